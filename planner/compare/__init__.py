"""Runs several planners on one case and judges their plans with one simulator."""
