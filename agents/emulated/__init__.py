"""Emulated workers, for tests and demonstrations."""
