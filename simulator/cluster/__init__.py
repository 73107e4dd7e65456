"""Which devices are up, and where."""
