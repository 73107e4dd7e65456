"""How the ranks of a plan reach each other: as threads, as processes, on CPU or on GPU."""
