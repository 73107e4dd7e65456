"""Snapshot files: written, placed, fetched, restored and converted."""
