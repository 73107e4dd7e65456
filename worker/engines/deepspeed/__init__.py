"""DeepSpeed as a training engine."""
