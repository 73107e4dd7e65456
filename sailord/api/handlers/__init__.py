"""One module for each group of addresses, and what they share."""
