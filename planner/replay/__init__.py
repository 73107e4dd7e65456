"""Policies on traces of availability: throughput, cost, lost steps."""
