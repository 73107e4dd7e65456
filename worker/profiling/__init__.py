"""Timelines of ranks, their compute time, and fault injection."""
