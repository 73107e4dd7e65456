"""Worker processes: forked, given their ranks, watched, killed."""
