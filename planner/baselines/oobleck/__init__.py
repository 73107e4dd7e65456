"""Oobleck, as published, as a baseline."""
