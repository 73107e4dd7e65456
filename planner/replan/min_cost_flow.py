"""Minimum-cost flow: ships supplies of rows to the room of columns as cheaply as possible."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from simulator.arrays import Floats, Ints


def cheapest_flow(cost: Floats, supply: Ints, room: Ints, *, start: Ints | None = None) -> Ints:
    """How much of each row goes to each column, at the least total cost.

    Costs are not negative. ``start`` is an initial flow, which must cost nothing; it changes only
    where that lowers the total or makes room. Successive shortest paths with potentials: all of a
    row that can take a path takes it at once, so large numbers of equal things are as fast as few.
    """
    rows, columns = cost.shape
    flow = np.zeros((rows, columns), dtype=np.int64) if start is None else start.copy()
    assert not (cost * flow).any(), "the initial flow must cost nothing"
    left, free = supply - flow.sum(axis=1), room - flow.sum(axis=0)
    assert left.sum() <= free.sum(), "not enough room for all supplies"
    assert (free >= 0).all(), "the initial flow exceeds the room"
    u, v = np.zeros(rows), np.zeros(columns)
    for row in np.flatnonzero(left).tolist():
        while left[row]:
            path = _find_shortest(row, cost - u[:, None] - v[None, :], flow, free, u, v)
            last = path[-1][1]
            moved = min(left[row], free[last])
            # Along a path, a column passes on from the next row what it takes in from the previous
            # one.
            for (_, column), (giver, _) in pairwise(path):
                moved = min(moved, flow[giver, column])
            for step, (taker, column) in enumerate(path):
                flow[taker, column] += moved
                if step + 1 < len(path):
                    flow[path[step + 1][0], column] -= moved
            left[row] -= moved
            free[last] -= moved
    return flow


def _find_shortest(
    row: int, reduced: Floats, flow: Ints, free: Ints, u: Floats, v: Floats
) -> list[tuple[int, int]]:
    """The cheapest chain of moves from a row to a column with room; updates the potentials."""
    columns = len(free)
    reduced = np.maximum(reduced, 0.0)  # Only rounding makes them negative.
    distance, giver = reduced[row].copy(), np.full(columns, row)
    row_distance = {row: 0.0}
    came_by: dict[int, int] = {}
    done = np.zeros(columns, dtype=bool)
    while True:
        waiting = np.where(done, np.inf, distance)
        nearest = float(waiting.min())
        assert np.isfinite(nearest), "no column with room can be reached"
        # Prefer a near column with room, then the first, so that nothing moves needlessly.
        near = waiting == nearest
        roomy = near & (free > 0)
        column = int((roomy if roomy.any() else near).argmax())
        done[column] = True
        if free[column] > 0:
            break
        for other in np.flatnonzero(flow[:, column]).tolist():
            if other in row_distance:
                continue
            row_distance[other], came_by[other] = nearest, column
            further = nearest + reduced[other]
            closer = ~done & (further < distance)
            distance[closer], giver[closer] = further[closer], other
    for other, there in row_distance.items():
        u[other] += nearest - there
    v[done] -= nearest - distance[done]
    path = []
    while True:
        taker = int(giver[column])
        path.append((taker, column))
        if taker == row:
            return path[::-1]
        column = came_by[taker]
