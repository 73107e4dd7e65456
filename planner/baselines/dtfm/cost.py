"""The cost of DTFM's partitions: gradient sums in groups, and the cheapest path through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Bools, Floats

STAGES_MAX = 12
"""Most stages; each further one doubles the time of the path search."""
SENTINEL_S = 1e6
"""Stands for a forbidden pair in the published matching; real costs were taken to be smaller."""

DevicePartition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class DtfmInputs:
    """DTFM's inputs: links between all pairs of devices, two sizes, and the degrees."""

    delay_ms: Floats
    bandwidth_gbit_per_s: Floats
    activation_gb: float
    """What one micro batch sends from stage to stage; 1 GB is 1e9 bytes."""
    gradient_gb: float
    """What a replica of the largest stage sums."""
    stages: int
    replicas: int
    sentinel_s: float = math.inf

    @property
    def devices(self) -> int:
        return self.stages * self.replicas


@dataclass(frozen=True, slots=True)
class DtfmPlan:
    """A partition, the order of its groups, and the cost of their links."""

    seconds: float
    data_parallel_s: float
    pipeline_s: float
    partition: DevicePartition
    order: tuple[int, ...]


# Cost ------------------------------------------------------------------------------------------


def link_seconds(inputs: DtfmInputs, size_gb: float) -> Floats:
    """Seconds that a message takes between each pair of devices."""
    seconds: Floats = inputs.delay_ms / 1e3 + size_gb * 8 / inputs.bandwidth_gbit_per_s
    return seconds


class DtfmCosts:
    """Judges partitions of one job; the link tables are computed once."""

    def __init__(self, inputs: DtfmInputs) -> None:
        self.inputs = inputs
        self.send = link_seconds(inputs, inputs.activation_gb)
        self.share = 2 * link_seconds(inputs, inputs.gradient_gb / inputs.replicas)
        for table in (self.send, self.share):
            np.fill_diagonal(table, 0.0)

    def plan(self, partition: DevicePartition) -> DtfmPlan:
        """The plan with the cheapest order of these groups."""
        shares = self.data_parallel(partition)
        pipeline, order = self.pipeline(partition)
        return DtfmPlan(shares + 2 * pipeline, shares, pipeline, partition, order)

    def data_parallel(self, partition: DevicePartition) -> float:
        """The busiest device of all groups exchanges its share with every other of its group."""
        return max(float(self.share[np.ix_(g, g)].sum(axis=1).max()) for g in partition)

    def pipeline(self, partition: DevicePartition) -> tuple[float, tuple[int, ...]]:
        """The cheapest open path through all groups."""
        count = len(partition)
        between = np.zeros((count, count))
        for a in range(count):
            for b in range(a):
                between[a, b] = between[b, a] = self.matching(partition[b], partition[a])[0]
        return cheapest_path(between)

    def matching(self, here: Sequence[int], there: Sequence[int]) -> tuple[float, list[int]]:
        """Largest cost in the best pairing of two groups, and the partner of each member.

        As published, where this cost reaches the sentinel, it is the largest of all pairs instead.
        """
        cost = self.send[np.ix_(here, there)]
        values = np.unique(cost)
        low, high = 0, len(values) - 1
        pairs = perfect_matching(cost <= values[high])
        assert pairs is not None, "a pairing exists where all pairs are allowed"
        while low < high:
            middle = (low + high) // 2
            found = perfect_matching(cost <= values[middle])
            if found is None:
                low = middle + 1
            else:
                high, pairs = middle, found
        if values[high] >= self.inputs.sentinel_s:
            return float(values[-1]), pairs
        return float(values[high]), pairs


def perfect_matching(allowed: Bools) -> list[int] | None:
    """A partner for every row among its allowed columns, by augmenting paths, or none."""
    packed = np.packbits(allowed, axis=1, bitorder="little")
    columns = [int.from_bytes(row.tobytes(), "little") for row in packed]
    owner: dict[int, int] = {}
    tried = 0

    def place(row: int) -> bool:
        nonlocal tried
        while open_columns := columns[row] & ~tried:
            lowest = open_columns & -open_columns
            tried |= lowest
            if lowest not in owner or place(owner[lowest]):
                owner[lowest] = row
                return True
        return False

    for row in range(len(columns)):
        tried = 0
        if not place(row):
            return None
    partner = [0] * len(columns)
    for column, row in owner.items():
        partner[row] = column.bit_length() - 1
    return partner


def cheapest_path(between: Floats) -> tuple[float, tuple[int, ...]]:
    """The cheapest path through all nodes, each once, by a program over subsets."""
    count = len(between)
    assert count <= STAGES_MAX, count
    best = np.full((1 << count, count), np.inf)
    for node in range(count):
        best[1 << node, node] = 0.0
    for visited in range(1, 1 << count):
        reached = (best[visited][:, None] + between).min(axis=0)
        for node in range(count):
            if not visited >> node & 1:
                best[visited | 1 << node, node] = reached[node]
    visited = (1 << count) - 1
    node = int(best[visited].argmin())
    seconds, path = float(best[visited, node]), [node]
    while visited := visited & ~(1 << node):
        node = int((best[visited] + between[:, node]).argmin())
        path.append(node)
    return seconds, tuple(reversed(path))
