"""The next plan after a change: repairs, assignment to nodes, and what a move costs."""
