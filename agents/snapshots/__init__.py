"""Snapshots in memory: kept, served, replicated and uploaded."""
