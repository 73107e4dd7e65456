"""Text for people: tables, and what the cluster and its capacity look like on a terminal."""
