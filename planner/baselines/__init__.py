"""Planners of the literature, to compare ours with: one folder each."""
