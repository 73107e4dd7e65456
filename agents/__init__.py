"""The agent, one per node: runs workers, keeps their snapshots and reports to the leader."""
