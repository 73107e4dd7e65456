"""Which rank holds which layers, tensors and shards under a plan."""
