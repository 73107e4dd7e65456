"""Least-cost transport: supplies of some rows shipped to the room of some columns."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from simulator.arrays import Floats, Ints


def cheapest_flow(cost: Floats, supply: Ints, room: Ints, *, start: Ints | None = None) -> Ints:
    """How much of each row goes to each column, at the least cost in sum.

    Costs are not negative. ``start`` is a flow to begin with, which must cost nothing; it is
    changed only where that makes the whole cheaper, or makes room. Successive shortest paths
    with potentials: all of a row that can go one way goes at once, so that equal things in
    large numbers take no longer than few.
    """
    rows, columns = cost.shape
    flow = np.zeros((rows, columns), dtype=np.int64) if start is None else start.copy()
    assert not (cost * flow).any(), "a start that costs something is no start"
    left, free = supply - flow.sum(axis=1), room - flow.sum(axis=0)
    assert left.sum() <= free.sum(), "there is not enough room"
    assert (free >= 0).all(), "the start takes more room than there is"
    u, v = np.zeros(rows), np.zeros(columns)
    for row in np.flatnonzero(left).tolist():
        while left[row]:
            path = _shortest(row, cost - u[:, None] - v[None, :], flow, free, u, v)
            last = path[-1][1]
            moved = min(left[row], free[last])
            # Along a path, what a column takes in from one row it gives back from the next.
            for (_, column), (giver, _) in pairwise(path):
                moved = min(moved, flow[giver, column])
            for step, (taker, column) in enumerate(path):
                flow[taker, column] += moved
                if step + 1 < len(path):
                    flow[path[step + 1][0], column] -= moved
            left[row] -= moved
            free[last] -= moved
    return flow


def _shortest(
    row: int, reduced: Floats, flow: Ints, free: Ints, u: Floats, v: Floats
) -> list[tuple[int, int]]:
    """The cheapest chain of moves from a row to a column with room; potentials follow."""
    columns = len(free)
    reduced = np.maximum(reduced, 0.0)  # Rounding alone makes them negative.
    distance, giver = reduced[row].copy(), np.full(columns, row)
    row_distance = {row: 0.0}
    came_by: dict[int, int] = {}
    done = np.zeros(columns, dtype=bool)
    while True:
        waiting = np.where(done, np.inf, distance)
        nearest = float(waiting.min())
        assert np.isfinite(nearest), "no column with room can be reached"
        # Of equally near columns the first with room, then the first: nothing moves needlessly.
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
