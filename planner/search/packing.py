"""The master problem: how many pipelines of which template fit on the GPUs, and run the most."""

from __future__ import annotations

import numpy as np

from simulator.arrays import Floats

PIVOTS_MAX = 200
"""Pivots before the packing so far is taken; a handful are usual."""
TINY = 1e-9


def best_packing(values: Floats, uses: Floats, room: Floats) -> Floats:
    """The most valuable multiples of some things: maximise ``values @ x``, ``uses @ x <= room``.

    ``uses`` has a row per resource and a column per thing. This is the simplex method in a dense
    table, from the empty packing on: resources are few, so each pivot takes microseconds. The
    answer is a vertex, so no more things are used than there are resources.
    """
    rows, columns = uses.shape
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns], table[:rows, columns:-1] = uses, np.eye(rows)
    table[:rows, -1], table[-1, :columns] = room, -values
    basis = np.arange(columns, columns + rows)
    least_gain = TINY * float(np.abs(values).max(initial=0.0))
    for _ in range(PIVOTS_MAX):
        enters = int(np.argmin(table[-1, :-1]))
        if table[-1, enters] >= -least_gain:
            break
        column = table[:rows, enters]
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(column > TINY, table[:rows, -1] / column, np.inf)
        leaves = int(np.argmin(steps))
        if not np.isfinite(steps[leaves]):
            break  # It uses nothing, so its number has no limit.
        table[leaves] /= table[leaves, enters]
        others = np.arange(rows + 1) != leaves
        table[others] -= np.outer(table[others, enters], table[leaves])
        basis[leaves] = enters
    found = np.zeros(columns + rows)
    found[basis] = np.maximum(table[:rows, -1], 0.0)
    return found[:columns]
