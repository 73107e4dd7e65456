"""One command that says what works on a machine's GPUs, and how fast."""
