"""The tour: a demonstration of recovery on a real cluster on this machine."""
