"""Which machines to rent: pure decisions, and the loop that runs them."""
