"""Other programs' checkpoints, in and out."""
