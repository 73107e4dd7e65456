"""A user's script: what it gives, and how it is run."""
