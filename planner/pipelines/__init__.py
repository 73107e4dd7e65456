"""Candidate pipelines, and mixes of them."""
