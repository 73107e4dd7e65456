"""The planner's question: supply, limits and objective."""
