"""The GPUs of a node: found, tested, watched."""
