"""GPUs, machine types, prices, and the constants of runtimes, each with its source."""
