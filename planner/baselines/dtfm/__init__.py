"""DTFM, as published, as a baseline."""
