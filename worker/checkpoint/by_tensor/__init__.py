"""A whole checkpoint, read or written one tensor at a time."""
