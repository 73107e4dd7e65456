"""Several planners on one case, under one judge."""
