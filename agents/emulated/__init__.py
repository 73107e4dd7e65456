"""Pretended workers, for tests and demonstrations."""
