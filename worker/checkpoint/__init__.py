"""Snapshots and checkpoints: write, place, fetch, restore and convert."""
