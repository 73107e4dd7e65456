"""Pure: what to measure next, and what measurements say."""
