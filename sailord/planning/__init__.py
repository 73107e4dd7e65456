"""Asks the planner, in processes of its own: plans for jobs, and which machines to rent."""
