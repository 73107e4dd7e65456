"""The device of a rank: a GPU, or the CPU."""
