"""What commands print on a terminal: tables and sentences about the cluster and its jobs."""
