"""The search under the event estimator, and a lower bound of its space."""
