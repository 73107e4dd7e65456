"""Where samples come from: each batch is a function of the step and of nothing else."""
