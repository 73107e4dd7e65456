"""The planner of the SOSP'25 paper, as published, as a baseline."""
