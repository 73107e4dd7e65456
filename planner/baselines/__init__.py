"""Planners of the literature, one folder each, behind the interface of ``planner.compare``."""
