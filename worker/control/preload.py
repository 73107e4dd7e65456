"""Loads in the parent process what every forked rank needs."""

from __future__ import annotations

import gc

import torch

from worker.host_memory import keep_few_heaps


def preload() -> None:
    """Run torch's lazy imports once, before the fork, and freeze the garbage collector's heap."""
    keep_few_heaps()
    with torch.device("meta"):
        # Building an embedding on the meta device imports several torch modules.
        torch.nn.Embedding(1, 1)
    # Without this, a collection in a rank would touch, and so copy, the parent's pages.
    gc.freeze()
