"""The commands ``checkpoint ...``."""
