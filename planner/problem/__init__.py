"""The planning question: GPUs on offer, limits, objective, and the answer."""
