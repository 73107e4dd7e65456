"""Who holds what: ranks, tensors, cuts and shards."""
