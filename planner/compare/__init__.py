"""Runs several planners on one case and judges their plans by one simulator."""
