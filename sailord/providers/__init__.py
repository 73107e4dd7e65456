"""Providers of instances: one interface, and its implementations."""
