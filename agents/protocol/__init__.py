"""Records that sailord and agents exchange, their store keys and their codec."""
