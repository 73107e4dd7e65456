"""GPUs, machine types, prices and runtime constants, each with its source."""
