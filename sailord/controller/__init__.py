"""Runs the core: leader election, event loop, store writes, effects."""
