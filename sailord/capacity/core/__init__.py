"""Decides which instances to rent and to delete: pure functions of state and event."""
