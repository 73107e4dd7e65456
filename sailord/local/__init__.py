"""A cluster on this machine: sailord, agents and workers as real processes."""
