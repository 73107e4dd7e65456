"""The tour: a story told by a real cluster on this machine."""
