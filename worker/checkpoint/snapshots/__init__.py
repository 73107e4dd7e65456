"""A rank takes snapshots while it trains: when, how, at what cost."""
