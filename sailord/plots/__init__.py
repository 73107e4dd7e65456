"""Pictures and timelines of plans."""
