"""The next plan after a change: repairs, assignment to nodes, transfers, cost of the move."""
