"""What several of the literature's planners need."""
