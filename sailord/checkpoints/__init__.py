"""Durable checkpoints: manifests, verification, retention, resume."""
