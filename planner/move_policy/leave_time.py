"""When a job leaves nodes whose end is announced: as late as the move allows."""

from __future__ import annotations

RESERVE_S = 30.0
"""Reserve for a node that ends before its announced time, or a move that exceeds its prediction."""


def leave_at_s(ends_s: float, move_s: float, step_s: float) -> float:
    """Return the last moment at which a move off nodes that end at ``ends_s`` may begin.

    The running step ends first, then the move takes ``move_s``.
    """
    return ends_s - move_s - step_s - RESERVE_S
