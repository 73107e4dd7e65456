"""Read files, and collect every mistake in them with its place and its cure."""
