"""Signed HTTP between sailord and agents."""
