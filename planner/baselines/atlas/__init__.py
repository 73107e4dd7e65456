"""Atlas, as published, as a baseline."""
