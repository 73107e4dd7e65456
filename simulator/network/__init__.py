"""Seconds of a transfer between two places."""
