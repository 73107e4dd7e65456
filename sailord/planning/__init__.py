"""The planner's processes, and the messages to them."""
