"""Galvatron, as published, as a baseline."""
