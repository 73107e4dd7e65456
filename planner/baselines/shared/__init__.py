"""Code that several baselines use."""
