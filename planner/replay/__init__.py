"""Policies on traces of availability: goodput, cost, lost steps."""
