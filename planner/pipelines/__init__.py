"""Candidate pipelines, and mixes of them that form a plan."""
