"""Seconds and bytes of each layer, from a profile or from the roofline model."""
