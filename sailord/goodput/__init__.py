"""The goodput ledger: what every paid second of every GPU was spent on."""
