"""Google Compute Engine as a provider of instances."""
