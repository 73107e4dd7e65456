"""Transfer times between two places, and egress prices."""
