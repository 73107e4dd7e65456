"""Estimates one iteration of a plan: its time, memory and dollars."""
