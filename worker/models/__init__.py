"""Models as ordered lists of layers that know nothing of parallelism."""
