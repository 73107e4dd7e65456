"""The models: built-in families, a user's own module, other programs' weights."""
