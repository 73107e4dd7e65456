"""Measurements of the network between two agents."""
