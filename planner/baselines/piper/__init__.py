"""Piper, as published, as a baseline."""
