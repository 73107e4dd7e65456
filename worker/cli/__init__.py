"""The command line ``python -m worker``."""
