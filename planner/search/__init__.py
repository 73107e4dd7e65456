"""The search under the event estimator, and the bound of what any plan could reach."""
