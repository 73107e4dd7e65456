"""Whether all ranks of a group are there, asked of the ranks' store by one short key.

With a key for each rank every question would grow with the group, all ranks ask it again and again,
and all questions pass through rank 0's process.
"""

from __future__ import annotations

from torch._C._distributed_c10d import Store

_PAUSE_S = 0.001
_PAUSED_RANKS = 8
"""Larger groups pause longer, so that all their ranks together ask no more often."""


def announce(store: Store, name: str, size: int) -> None:
    """Count this rank; the last one of the group tells that all are there."""
    if store.add(f"{name}/count", 1) == size:
        store.set(f"{name}/all", "")


def are_all_there(store: Store, name: str) -> bool:
    """Return whether all ranks of the group were counted."""
    return bool(store.check([f"{name}/all"]))


def pause_s(size: int) -> float:
    """Return the seconds between two questions of a rank of a group."""
    return _PAUSE_S * max(1.0, size / _PAUSED_RANKS)
