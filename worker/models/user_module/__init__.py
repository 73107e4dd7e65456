"""A user's own module: where it is cut, what it costs, and the layers that a rank holds of it."""
