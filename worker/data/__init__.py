"""Training data: each batch is a function of the step alone."""
