"""Job and plan files, and whether a plan fits its job and its cluster."""
