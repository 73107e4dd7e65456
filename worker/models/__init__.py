"""Models as lists of layers that do not know about parallelism."""
