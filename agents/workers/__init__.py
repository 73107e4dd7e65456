"""Worker processes: forked, watched, told their ranks, ended."""
