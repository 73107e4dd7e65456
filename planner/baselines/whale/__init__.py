"""A Whale-style split, as published, as a baseline."""
