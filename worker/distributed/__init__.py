"""Communication between ranks: threads or processes, on CPUs or GPUs."""
