"""One iteration of a plan: its time, its memory and its dollars."""
