"""Models as lists of layers with their parameters, FLOPs and bytes."""
