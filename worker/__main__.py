"""``python -m worker``: training without a daemon, and what its data is made with."""

from __future__ import annotations

import os

# Ranks are forked, and a fork takes one thread along: numpy must not start others when imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads that wait give the core to others: while they spin, other ranks cannot compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from worker.cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m worker")
