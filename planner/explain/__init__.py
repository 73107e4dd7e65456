"""Reasons: why this plan was chosen, or why there is none."""
