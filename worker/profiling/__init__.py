"""What each rank did and when: timelines and compute time; also fault injection."""
