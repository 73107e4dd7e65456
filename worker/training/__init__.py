"""The training step: pipeline, gradient sums, vote, optimizer."""
