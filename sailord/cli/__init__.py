"""The command line `sailorctl`."""
