"""Several jobs at once: each has a part of the nodes, and moves by ``core.decide``."""
