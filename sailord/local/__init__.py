"""A whole cluster on this machine: sailord, agents and workers as real processes."""
