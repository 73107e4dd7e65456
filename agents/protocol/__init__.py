"""What sailord and agents say to each other: records, store keys and their codec."""
