"""One command for the day a GPU is there: what works on it, and how fast."""
