"""Decides whether a better plan is worth the move to it."""
