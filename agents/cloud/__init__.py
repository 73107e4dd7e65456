"""Google's metadata server, and the notices of a departure."""
