"""Seconds and bytes of one layer, from a profile or from the roofline."""
