"""Aceso, as published, as a baseline."""
