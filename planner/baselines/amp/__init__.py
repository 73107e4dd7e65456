"""AMP, as published, as a baseline."""
