"""The search of the SOSP'25 paper's planner: a program over stages and the GPUs left for them.

``planner.py`` says which habits are kept or mended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from planner.baselines.sailor_sosp25.cost import (
    EndRun,
    PipelineTail,
    Sosp25Inputs,
    Sosp25Region,
    joined,
    stage_part,
)
from planner.baselines.sailor_sosp25.stages import Sosp25Shape
from planner.compare.interface import Mode

BUDGET_STEPS = 100
"""``fixed`` rounds budgets down to multiples of the whole budget divided by this."""
STAGES_TRIED_MAX = {"published": 1_000_000, "fixed": 250_000}
"""Ways to run a stage after which it stops; three kinds have millions, and good ones come early."""
Left = tuple[tuple[int, ...], ...]
"""GPUs that are left in each zone of a region, by kind."""
RegionOrder = tuple[str, ...]
"""Regions that stages go through."""


@dataclass(frozen=True, slots=True)
class Sosp25Goal:
    """The goal, with its one limit: dollars for the fastest plan, seconds for the cheapest."""

    by_cost: bool = False
    usd_max: float = math.inf
    seconds_max: float = math.inf


@dataclass(frozen=True, slots=True)
class Sosp25Plan:
    """The planner's own plan format."""

    seconds: float
    usd: float
    micro_batch: int
    cuts: tuple[int, ...]
    columns: tuple[tuple[EndRun, ...], ...]

    @property
    def gpus(self) -> int:
        return sum(tp * count for column in self.columns for (_, _, tp), count in column)


def search(inputs: Sosp25Inputs, goal: Sosp25Goal, mode: Mode) -> list[Sosp25Plan]:
    """All plans found, best first."""
    walk = _Walk(inputs, goal, mode)
    found = []
    try:
        for stages, b in itertools.product(range(1, inputs.layers + 1), inputs.micro_batches()):
            for plan in walk.plans(stages, b):
                found.append(plan)
    except _SpentError:
        pass  # The best so far counts.
    return sorted(found, key=lambda f: (f.usd if goal.by_cost else f.seconds, f.gpus))


class _SpentError(Exception):
    """The search budget is used up."""


@dataclass(slots=True, eq=False)
class _Walk:
    """One search with its cache."""

    inputs: Sosp25Inputs
    goal: Sosp25Goal
    mode: Mode
    regions: dict[str, tuple[int, ...]] = field(init=False)
    orders: list[RegionOrder] = field(init=False)
    known: dict[object, PipelineTail | None] = field(default_factory=dict)
    stages: dict[object, PipelineTail] = field(default_factory=dict)
    times: dict[object, float] = field(default_factory=dict)
    tried: int = 0

    def __post_init__(self) -> None:
        """Zones of a region with most GPUs first."""
        zones = self.inputs.zones
        self.regions = {}
        for index in sorted(range(len(zones)), key=lambda z: -sum(zones[z][2])):
            region = zones[index][1]
            self.regions[region] = (*self.regions.get(region, ()), index)
        self.orders = sorted(self._orders(), key=lambda order: -self._find_slowest_speed(order))

    def _orders(self) -> Iterator[tuple[str, ...]]:
        """Each choice of regions, in the order whose slowest hop is the fastest."""
        for size in range(1, len(self.regions) + 1):
            for chosen in itertools.combinations(sorted(self.regions), size):
                yield max(itertools.permutations(chosen), key=self._find_slowest_speed)

    def _find_slowest_speed(self, order: tuple[str, ...]) -> float:
        kinds = range(len(self.inputs.kinds))
        return min(
            (
                max(
                    self.inputs.top_speed((self.regions[a][0], k, 1), (self.regions[b][0], j, 1))
                    for k in kinds
                    for j in kinds
                )
                for a, b in itertools.pairwise(order)
            ),
            default=math.inf,
        )

    # -- the outer loops -------------------------------------------------------------------------

    def plans(self, stages: int, b: int) -> Iterator[Sosp25Plan]:
        """The plans with this many stages: over regions, then over replicas until it gets worse."""
        shape = Sosp25Shape.of(self.inputs, stages, b, self.mode)
        for order in self.orders:
            best = math.inf
            for replicas in self.replicas(b):
                least_s = shape.least_s(self.inputs, replicas)
                if not self.goal.by_cost and least_s >= best:
                    break
                if least_s > self.goal.seconds_max:
                    continue
                left = self._all_of(order[0])
                part = self.solve(shape, 0, replicas, order, left, self.goal.usd_max)
                if part is None:
                    continue
                score = self._score(part)
                kept = part.seconds <= self.goal.seconds_max and part.usd <= self.goal.usd_max
                if score >= best:
                    break
                if kept:
                    best = score
                    yield Sosp25Plan(part.seconds, part.usd, b, shape.cuts, tuple(part.columns()))

    def replicas(self, b: int) -> list[int]:
        """The fewest replicas for each number of micro batches, in the order of the goal."""
        gpus = sum(sum(counts) for _, _, counts in self.inputs.zones)
        if self.mode == "published":
            gpus = max(1, gpus - 1)  # Kept: the upper end is exclusive.
        fewest: dict[int, int] = {}
        for replicas in range(1, gpus + 1):
            fewest.setdefault(math.ceil(self.inputs.global_batch / (b * replicas)), replicas)
        return list(fewest.values()) if self.goal.by_cost else list(fewest.values())[::-1]

    def _all_of(self, region: str) -> Left:
        return tuple(self.inputs.zones[zone][2] for zone in self.regions[region])

    # -- the program over stages -----------------------------------------------------------------

    def solve(
        self,
        shape: Sosp25Shape,
        s: int,
        replicas: int,
        order: RegionOrder,
        left: Left,
        usd_max: float,
    ) -> PipelineTail | None:
        """The stages from ``s`` on, using the rest of the first region and all of the others."""
        zones = itertools.chain(left, *map(self._all_of, order[1:]))
        there = tuple(map(sum, zip(*zones, strict=True)))
        if replicas * (shape.stages - s) > _room(shape.tps_least[s], (there,)):
            return None
        if self.mode == "published":
            usd_max = round(usd_max, 2) or math.inf if math.isfinite(usd_max) else usd_max
            sums = tuple(map(sum, zip(*left, strict=True)))
            state: object = (order, None) if s == 0 else (order[0], sums)
        else:
            state = (order, left)
        key = (shape.b, shape.cuts[s], shape.stages - s, replicas, state, usd_max)
        if key not in self.known:
            behind = self._solve_last if s == shape.stages - 1 else self._solve_before_others
            self.known[key] = behind(shape, s, replicas, order, left, usd_max)
        return self.known[key]

    def _solve_last(
        self,
        shape: Sosp25Shape,
        s: int,
        replicas: int,
        order: RegionOrder,
        left: Left,
        usd_max: float,
    ) -> PipelineTail | None:
        best: PipelineTail | None = None
        seen = set()
        for counts in self._mixes(shape.tps[s], left, replicas):
            column, _ = self._take_gpus(order[0], left, shape.tps[s], counts, is_last=True)
            if not column:
                continue
            alike = tuple(dict.fromkeys(end for end, _ in column))
            if not self.goal.by_cost and math.isinf(usd_max):
                if alike in seen:
                    continue  # The mix before took as long.
                seen.add(alike)
            stage = self._stage(shape, s, column, order[0])
            if self._keeps(stage, usd_max) and (
                best is None or self._score(stage) < self._score(best)
            ):
                best = stage
        return best

    def _solve_before_others(
        self,
        shape: Sosp25Shape,
        s: int,
        replicas: int,
        order: RegionOrder,
        left: Left,
        usd_max: float,
    ) -> PipelineTail | None:
        if self.goal.by_cost and self.mode == "published":
            return None  # Kept: with cost as the goal, plans of several stages are dropped.
        # Tried in the order of their bounds; of equally good ones that of the least index is taken.
        tries = sorted(self._tries(shape, s, replicas, order, left, usd_max), key=lambda t: t[:2])
        best: PipelineTail | None = None
        at = -1
        for bound, index, stage, regions, rest in tries:
            if best is not None and bound > self._score(best):
                break
            part = self._join_rest(shape, s, stage, regions, rest, usd_max)
            if part is None:
                continue
            if best is None or (self._score(part), index) < (self._score(best), at):
                best, at = part, index
        return best

    def _tries(
        self,
        shape: Sosp25Shape,
        s: int,
        replicas: int,
        order: RegionOrder,
        left: Left,
        usd_max: float,
    ) -> Iterator[tuple[float, int, PipelineTail, RegionOrder, Left]]:
        """Ways to run stage ``s``: a bound of the time, the stage, and the GPUs left after it."""
        before = math.nan
        most = math.ceil(self.inputs.global_batch / (shape.b * replicas))
        following = shape.tps[s + 1]
        for index, counts in enumerate(self._mixes(shape.tps[s], left, replicas)):
            alike = self._mixed_s(shape, s, replicas, order[0], tuple(map(bool, counts)))
            if alike == before:
                continue
            column, rest = self._take_gpus(order[0], left, shape.tps[s], counts, is_last=False)
            regions = order
            if _room(following, rest) < replicas:
                regions = order[1:]  # The next region, but never the one after it.
                if not regions:
                    continue
                rest = self._all_of(regions[0])
            stage = self._stage(shape, s, column, order[0])
            if stage.usd > usd_max:
                continue
            before = alike
            straggler = max(stage.straggler_s, shape.straggler_least[s + 1])
            compute = stage.compute_s + shape.compute_least[s + 1]
            bound = (most - 1) * straggler + compute + stage.sync_s
            if bound > self.goal.seconds_max:
                continue
            if self.goal.by_cost:
                bound *= stage.usd_per_s + replicas * shape.usd_per_s_least[s + 1]
            yield bound, index, stage, regions, rest

    def _join_rest(
        self,
        shape: Sosp25Shape,
        s: int,
        stage: PipelineTail,
        order: RegionOrder,
        left: Left,
        usd_max: float,
    ) -> PipelineTail | None:
        """The stage joined with the best continuation within the budget."""
        replicas = sum(count for _, count in stage.column)
        allowed = usd_max - stage.usd
        while True:
            if self.mode == "fixed":
                allowed = self._round_budget(allowed)
            rest = self.solve(shape, s + 1, replicas, order, left, allowed)
            if rest is None:
                return None
            part = joined(self.inputs, shape.b, shape.cuts[s + 1], stage, rest)
            if self.mode == "published":
                return part if part.traffic_usd <= usd_max else None
            if self._keeps(part, usd_max):
                return part
            # The joined stages take longer and cost more, so less of the budget is left.
            allowed -= part.usd - usd_max
            if math.isinf(usd_max) or allowed <= 0 or rest.straggler_s <= stage.straggler_s:
                return None

    def _round_budget(self, usd: float) -> float:
        """Budgets in steps, so that few distinct ones occur."""
        step = self.goal.usd_max / BUDGET_STEPS
        return math.floor(usd / step) * step if math.isfinite(usd) else usd

    def _keeps(self, part: PipelineTail, usd_max: float) -> bool:
        return part.usd <= usd_max and part.seconds <= self.goal.seconds_max

    def _score(self, part: PipelineTail) -> float:
        return part.usd if self.goal.by_cost else part.seconds

    # -- one stage -------------------------------------------------------------------------------

    def _mixes(self, tps: Sequence[int], left: Left, replicas: int) -> Iterator[tuple[int, ...]]:
        """Replicas by kind that fit the zones, the fewest of the first kind first."""
        rooms = [_room((0,) * k + (tp,), left) for k, tp in enumerate(tps)]

        def deal(kind: int, rest: int) -> Iterator[tuple[int, ...]]:
            if kind == len(rooms) - 1:
                if rest <= rooms[kind]:
                    yield (rest,)
                return
            for count in range(min(rest, rooms[kind]) + 1):
                for others in deal(kind + 1, rest - count):
                    yield (count, *others)

        return deal(0, replicas)

    def _take_gpus(
        self, region: str, left: Left, tps: Sequence[int], counts: Sequence[int], *, is_last: bool
    ) -> tuple[tuple[EndRun, ...], Left]:
        """The replicas by kind and zone, and the GPUs left; no replicas if some find no room."""
        self.tried += 1
        if self.tried > STAGES_TRIED_MAX[self.mode]:
            raise _SpentError
        column: list[EndRun] = []
        rest = [list(zone) for zone in left]
        for kind, (tp, count) in enumerate(zip(tps, counts, strict=True)):
            wanted = count
            for place, zone in enumerate(self.regions[region]):
                if not wanted:
                    break
                here = min(wanted, rest[place][kind] // tp)
                if self.mode == "published" and is_last and place:
                    here = max(here, 1)  # Kept: it steps on once, whatever is there.
                if here:
                    column.append(((zone, kind, tp), here))
                wanted -= here
                # Kept for zones already passed: their remaining GPUs still count.
                rest[place][kind] -= here * tp
            if wanted:
                return (), left
        return tuple(column), tuple(map(tuple, rest))

    def _mixed_s(
        self, shape: Sosp25Shape, s: int, replicas: int, region: str, kinds: tuple[bool, ...]
    ) -> float:
        """Time of a stage on these kinds, as if all were in the region's first zone."""
        key = (shape.b, s, shape.stages, replicas, region, kinds)
        if key not in self.times:
            home = self.regions[region][0]
            ends = [(home, k, shape.tps[s][k]) for k, is_used in enumerate(kinds) if is_used]
            column = ((ends[0], replicas - len(ends) + 1), *((end, 1) for end in ends[1:]))
            cut = (shape.cuts[s], shape.cuts[s + 1])
            stage = stage_part(self.inputs, shape.b, cut, column, Sosp25Region((home,), home))
            self.times[key] = stage.seconds
        return self.times[key]

    def _stage(
        self, shape: Sosp25Shape, s: int, column: tuple[EndRun, ...], region: str
    ) -> PipelineTail:
        zones = tuple(dict.fromkeys(zone for (zone, _, _), _ in column))
        home = None
        if self.mode == "published":
            home = self.regions[region][0]
            if s < shape.stages - 1:
                zones = (home,)  # Kept: all zones count in the last stage alone.
        cut = (shape.cuts[s], shape.cuts[s + 1])
        key = (shape.b, cut, column)
        if key not in self.stages:
            self.stages[key] = stage_part(
                self.inputs, shape.b, cut, column, Sosp25Region(zones, home)
            )
        return self.stages[key]


def _room(tps: Sequence[int], left: Sequence[Sequence[int]]) -> int:
    """Number of replicas that fit into the GPUs left."""
    return sum(gpus // tp for zone in left for gpus, tp in zip(zone, tps, strict=False) if tp)
