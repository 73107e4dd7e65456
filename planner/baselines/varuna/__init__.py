"""Varuna, as published, as a baseline."""
