"""Availability of devices over time."""
