"""Metis, as published, as a baseline."""
