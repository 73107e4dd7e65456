"""Reads files, and reports every mistake in them with its place and cure."""
