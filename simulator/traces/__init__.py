"""Availability of GPUs over time: traces, and a player that runs policies on them."""
