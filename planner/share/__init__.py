"""Several jobs on one cluster: which machines each of them gets."""
