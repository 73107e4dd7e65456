"""Rents and deletes instances: pure decisions in ``core``, and the loop that runs them."""
