"""Snapshots in memory: sealed, served, replicated, uploaded and deleted."""
