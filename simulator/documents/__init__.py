"""Read files, and report every mistake in them with its place and cure."""
