"""Measures the cluster's network with its agents, and writes ``network.json``."""
