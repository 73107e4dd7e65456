"""``python -m worker``: trains on this machine without a daemon; converts data and checkpoints."""

from __future__ import annotations

import os

# Ranks are forked, and a fork keeps only the calling thread: numpy must not start threads on
# import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Waiting threads sleep instead of spinning, so that other ranks get the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from worker.cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m worker")
