"""Timelines of ranks, and the time that they compute."""
