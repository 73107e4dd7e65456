"""Data sets of scripts, and how a run numbers their samples."""
