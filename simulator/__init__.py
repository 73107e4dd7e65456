"""Predicts the time, memory and cost of running a job under a plan."""
