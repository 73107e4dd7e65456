"""The least price of a pipeline, computed with the exact round trips through its stages.

``pricing`` takes the best times for the stages behind another one. Here a dynamic program builds
pipelines from their last stage on, and keeps, for each number of stages, first layer, GPU kind and
price so far, the least time of a micro batch's round trip, and of all passes of these stages. A
stage is added if these leave time for its neighbourhood (``stage_limits``).

Neighbouring stages on one machine share its NIC; stages on different machines pay for the hop. So
the stages of a machine are added one after the other, and a machine is complete only when it holds
as many stages as their times assume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.search.recomputation import Recomputation
from planner.search.stage_limits import StageTimeTables
from planner.search.stage_times import Neighbourhood, Times
from simulator.arrays import Floats, Ints, prefix_sums

LEVELS_MAX = 96
"""Most distinct prices; others are rounded down to one of them."""
STEP_WORK = 6000
"""Work, in table entries, of the steps whose time does not depend on their number."""
EASED = 1 + 1e-9
"""Tolerance of comparisons between sums that were rounded differently."""

WHOLE = -1
"""Instead of a case: the first machine is complete."""

_Tables = dict[tuple[int, int, int], Floats]
"""Arrays [0 or 1, first layer, level of price, index of the count], by the GPU kind of the first
stage, its case, and the stages on its machine so far: the least seconds of a round trip, and from
the first stage's first forward to its last backward."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """A stage to add."""

    choice: int
    hop: Floats
    """By boundary: seconds of a message to the stage behind it."""
    end: Floats
    """As in ``Neighbourhood``."""


@dataclass(frozen=True, eq=False)
class RoundTrips:
    """Tables of one micro batch size and range of pipelines, for any target time."""

    times: Times
    cases: Sequence[Neighbourhood]
    room: Floats
    """Micro batches that a stage may hold, by [choice, first layer, end]."""
    again: Recomputation
    again_s: Floats
    """Seconds of recomputation, as in ``Recomputation.seconds``."""
    kinds: tuple[str, ...]
    leave: Floats
    """By [choice, GPU kind behind, boundary]: least seconds of a message, one way."""

    @classmethod
    def of(
        cls,
        tables: StageTimeTables,
        micro_batch: int,
        fewest: int,
        most: int,
        *,
        is_rough: bool = False,
    ) -> RoundTrips:
        """Collect the tables; ``is_rough`` ignores which stages share a machine."""
        times, costs = tables.times(micro_batch), tables.costs
        kinds = tuple(sorted({choice.gpu for choice in times.choices}))
        sizes = np.array([costs.output_bytes(n) * micro_batch for n in range(costs.layer_count)])
        if is_rough:
            leave = np.repeat(times.transfer[:, None, :], len(kinds), axis=1)
        else:
            leave = np.array(
                [[tables.leave_s(c, sizes, gpu) for gpu in kinds] for c in times.choices]
            )
        return cls(
            times,
            tables.neighbourhoods(micro_batch, fewest, most, is_rough=is_rough),
            tables.room(micro_batch, fewest, most),
            tables.again,
            tables.again.seconds(micro_batch, fewest, most),
            kinds,
            leave,
        )

    def prices(
        self, seconds: float, counts: Ints, prices: Floats, *, highest: float, stages_max: int
    ) -> tuple[Floats, int]:
        """Lower bound of a pipeline's price by number of micro batches, at most ``highest``.

        Also the number of table entries computed.
        """
        search = _Search(self, seconds, counts, prices, highest)
        search.run(stages_max)
        return np.minimum(search.best, highest), search.work

    def entries(self, prices: Floats, highest: float, counts: int, stages_max: int) -> float:
        """Roughly the table entries to compute for so many numbers of micro batches."""
        stages = min(stages_max, self.times.layers, highest / float(prices.min()))
        most = np.array([case.most for case in self.cases]).sum()
        levels = len(levels_of(prices, highest))
        columns = counts * self.times.layers
        lengths = max(2.0, 2.5 * self.times.layers / max(stages, 1.0))
        return float(stages * most * 1.5 * lengths * (STEP_WORK + columns * levels / 2))


def levels_of(prices: Floats, highest: float) -> Floats:
    """All sums of prices up to ``highest``, or evenly spaced ones if there are too many."""
    each = sorted(set(prices.tolist()))
    known, newest = [0.0], [0.0]
    while newest:
        sums = {one + price for one in newest for price in each}
        newest = [x for x in sorted(sums) if x <= highest * EASED]
        known += newest
        if len(known) > LEVELS_MAX * 40:
            return np.linspace(0.0, highest, LEVELS_MAX)
    found = np.array(sorted(known))
    # Sums that differ only by rounding become one level: the least of them.
    found = found[np.diff(found, prepend=-highest) > 1e-9 * highest]
    return found if len(found) <= LEVELS_MAX else np.linspace(0.0, highest, LEVELS_MAX)


@dataclass(eq=False)
class _Search:
    """One target time and one set of prices."""

    trips: RoundTrips
    seconds: float
    counts: Ints
    prices: Floats
    highest: float
    work: int = 0
    best: Floats = field(init=False)
    levels: Floats = field(init=False)
    ranges: list[tuple[Ints, Ints]] = field(init=False)
    """By choice: the layers that a stage may have, as first layers and ends."""
    rows: list[Ints] = field(init=False)
    """By choice: the level that each level becomes with its price, -1 if it is too high."""

    def __post_init__(self) -> None:
        trips = self.trips
        self.best = np.full(len(self.counts), np.inf)
        self.levels = levels_of(self.prices, self.highest)
        sums = self.levels + self.prices[:, None]
        row = np.searchsorted(self.levels, sums.ravel() * EASED, side="right").reshape(sums.shape)
        self.rows = list(np.where(sums <= self.highest * EASED, row - 1, -1))
        first, end = np.triu_indices(trips.times.layers + 1, 1)
        fewest, self.ranges = int(self.counts.min()), []
        for work in trips.times.work:
            sums = prefix_sums(work)
            short = fewest * (sums[end] - sums[first]) <= self.seconds
            self.ranges.append((first[short], end[short]))

    def run(self, stages_max: int) -> None:
        """Build pipelines of up to ``stages_max`` stages."""
        behind: _Tables = {}
        for k in range(min(stages_max, self.trips.times.layers)):
            behind = self._longer(k, behind)
            if not behind:
                break
            for (_, case, _), (round_trip, _) in behind.items():
                if case == WHOLE:
                    complete = np.isfinite(round_trip[0])
                    price = np.where(complete, self.levels[:, None], np.inf).min(axis=0)
                    self.best = np.minimum(self.best, price)

    def _longer(self, k: int, behind: _Tables) -> _Tables:
        """Put a stage before those with ``k`` stages, on their first machine or on another."""
        trips, found = self.trips, _Tables()
        for number, choice in enumerate(trips.times.choices):
            kind = trips.kinds.index(choice.gpu)
            inside_s, away_s = trips.times.transfer[number], trips.leave[number]
            for which, case in enumerate(trips.cases):
                most = int(case.most[number])
                for beside in range(1, min(most, k + 1) + 1):
                    if beside > 1:
                        some = [(behind.get((kind, which, beside - 1)), inside_s)]
                    else:
                        some = [
                            (behind.get((other, WHOLE, 0)), away_s[other])
                            for other in range(len(trips.kinds))
                        ]
                    for after, hop in some if k else [(None, inside_s)]:
                        if k and after is None:
                            continue
                        stage = _Stage(number, hop, case.end[number])
                        if beside >= case.fewest:
                            at = (kind, WHOLE, 0)
                            self._add(found, at, after, k, stage, _row(case.rest_alone, k, number))
                        if beside < most:
                            at = (kind, which, beside)
                            self._add(found, at, after, k, stage, _row(case.rest, k, number))
        return found

    def _add(
        self,
        found: _Tables,
        at: tuple[int, int, int],
        after: Floats | None,
        k: int,
        stage: _Stage,
        rest: Floats,
    ) -> None:
        """Add the round trips with this stage first, by the layers that it may have."""
        trips, layers, n = self.trips, self.trips.times.layers, self.counts[None, :]
        number = stage.choice
        row = self.rows[number]
        if after is None:
            used = np.array([0])
        else:
            finite = np.flatnonzero(np.isfinite(after[0]).any(axis=(0, 2)))
            used = np.arange(finite[0], finite[-1] + 1)
        # Levels stay in order when a price is added, so only the last ones can be too high.
        used = used[row[used] >= 0]
        if not len(used):
            return
        first, end = self.ranges[number]
        ends = end == layers if k == 0 else end < layers
        first, end = first[ends], end[ends]
        self.work += STEP_WORK + 4 * len(first) * len(self.counts)
        f = trips.times.forward[number][first, end][:, None]
        b = trips.times.backward[number][first, end][:, None]
        inputs = trips.times.inputs[number][first, end][:, None]
        held = np.minimum(self.counts, k + 1)
        again = trips.again.at(trips.again_s, held, (number, first, end))
        b, inputs = b + again, inputs + again
        left = self.seconds - rest[first, end][:, None]
        own, once, later = f + b, f + inputs, np.maximum(n - k - 1, 0)
        allowed = np.where(n * own <= left * EASED, np.inf, -1.0)
        allowed[trips.room[number, first, end][:, None] < np.minimum(n, k + 1)] = -1.0
        if after is not None:
            allowed = np.minimum(allowed, left - n * b - later * f + inputs)
        kept = np.flatnonzero((allowed >= 0).any(axis=1))
        if not len(kept):
            return
        first, end, allowed = first[kept], end[kept], allowed[kept][:, None, :]
        way = stage.hop[end][:, None, None]
        # The gradient of the last micro batch's weights may follow.
        left = left - b + inputs
        f, inputs, once, left = (each[kept][:, None, :] for each in (f, inputs, once, left))
        if after is None:
            trip = np.where(allowed >= 0, once, np.inf)
            whole = n * trip
        else:
            trip, whole = after[:, end, used[0] : used[-1] + 1] + (once + 2 * way)
            for times, seconds in chains(n, k, f, inputs, way):
                np.maximum(whole, times * trip + seconds, out=whole)
            late = (trip > allowed * EASED) | (whole > left * EASED)
            trip[late] = whole[late] = np.inf
            self.work += 4 * trip.size
        firsts = int(np.searchsorted(first, 1))
        if firsts:
            end_s = stage.end[end[:firsts]][:, None, None]
            late = whole[:firsts] > self.seconds * EASED - end_s
            trip[:firsts][late] = np.inf
        starts = np.flatnonzero(np.diff(first, prepend=-1))
        least = np.stack([np.minimum.reduceat(each, starts, axis=0) for each in (trip, whole)])
        if not np.isfinite(least[0]).any():
            return
        rows, row = first[starts], row[used]
        if at not in found:
            found[at] = np.full((2, layers + 1, len(self.levels), len(self.counts)), np.inf)
        into = found[at]
        if len(row) == 1 or (np.diff(row) > 0).all():
            where = np.ix_(np.arange(2), rows, row)
            into[where] = np.minimum(into[where], least)
        else:
            for index, level in enumerate(row.tolist()):
                into[:, rows, level] = np.minimum(into[:, rows, level], least[:, :, index])


def chains(
    n: Ints, k: int, f: Floats, inputs: Floats, way: Floats
) -> list[tuple[Ints | int, Floats]]:
    """Chains of events from a stage's first forward to its last backward.

    Each as a number of its round trips, and the seconds of all else.
    """
    others = np.maximum((n - 1) * inputs + np.maximum(n - k - 1, 0) * f, (n - 1) * way)
    found: list[tuple[Ints | int, Floats]] = [(1, others)]
    again = n > k + 1
    if again.any():
        for times, passes in ((2, n - k - 2), ((n - 1) // (k + 1) + 1, (n - 1) % (k + 1))):
            seconds = np.where(again, passes * (f + inputs), others)
            found.append((np.where(again, times, 1), seconds))
    return found


def _row(table: Floats, behind: int, choice: int) -> Floats:
    """The part of a table by [stages behind or 1, choice, first layer, end]."""
    row: Floats = table[min(behind, len(table) - 1), choice]
    return row
