"""A lower bound of all plans under the event estimator.

Fix a target time T. Each stage can process at most n micro batches in it (``stage_limits``), so a
pipeline has a least price for any prices of GPU kinds (``pricing``). Plans with a given micro batch
size and number of pipelines are impossible within T if their pipelines cost more than all GPUs are
worth, at any of the prices tried. Dollars are one such price. Spans of time are examined best first
and halved until they are narrow. Why this certified bound holds: docs/planner.md, "The bound".

The searched space: 1F1B without interleaving (and zero-bubble schedules, if the tables divide
backwards), one micro batch size per plan, unsplit stages, any placement of stage groups, any number
of first layers recomputed if the job leaves that to the planner, and of the next ones offloaded if
the tables' memory says so.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.problem.bounds import ROUNDING, Bounds
from planner.problem.inventory import Lot, LotQuota
from planner.problem.objective import FREE_USD_PER_HOUR, Limits
from planner.search.pricing import (
    FOREVER_S,
    Priced,
    Reach,
    batch_counts,
    pipeline_prices,
    share_out,
)
from planner.search.round_trips import RoundTrips
from planner.search.stage_limits import StageTimeTables
from simulator.arrays import Floats, Ints

SPAN = 1.01
"""Spans of time narrower than this ratio are not halved."""
WORK_MAX = 2e7
"""Table entries to compute before the best bound so far is returned, about half a second."""
QUICK_WORK_MAX = 4e6
"""``WORK_MAX`` where latency matters more than a proof."""
GAP_WORK_MAX = 1e9
"""``WORK_MAX`` where a gap is asked for: up to a minute."""
NARROW = 1.2
"""Ranges of pipeline counts narrower than this ratio are not halved."""
SINGLE_MAX = 48
"""Ranges of at most this many pipelines are examined for each number of pipelines."""
TRIPS_TIMES = 2
"""Work limit of exact round trips, as a multiple of the rest of the bound's work."""
ROUGH_SHARE = 0.25
"""Work limit of rough round trips, which come before, as a share of that of exact ones."""
TRIPS_STEP = 1.03
"""Factor between the ends of a span that is examined with round trips."""
TRIPS_ROUNDS = 10
"""Times that the price of a pipeline is computed for further numbers of micro batches."""
CASE_WORK = 40_000
"""Work, in table entries, of the tables of one stage option in one case."""
SHARE_WORK, SHARE_PAIRS = 200, 16
"""Work, in table entries, of sharing out one micro batch, and pairs of these that are one entry."""
TRIPS_PRICE = 2.2
"""Cap on a pipeline's price, as a multiple of the average."""
TRIPS_COUNTS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.3, 1.7)
"""Numbers of micro batches that are solved first, as shares of the average."""
TILTS = (0.6, 1.6)
"""Factors by which one GPU kind's price is varied from its speed."""


@dataclass(frozen=True, slots=True)
class PipelineRange:
    """All plans of one micro batch size with a range of pipeline counts."""

    micro_batch: int
    fewest: int
    most: int

    def halves(self) -> tuple[PipelineRange, ...]:
        """The range split at its geometric mean."""
        middle = math.isqrt(self.fewest * self.most)
        return (
            PipelineRange(self.micro_batch, self.fewest, middle),
            PipelineRange(self.micro_batch, middle + 1, self.most),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Tariff:
    """A price for each stage option, and the total that all GPUs are worth at these prices."""

    prices: Floats
    budget: float


@dataclass(slots=True, eq=False)
class EventBound:
    """The bound for one job on one cluster, with the tables that all target times share."""

    tables: StageTimeTables
    lots: Sequence[Lot]
    grants: Sequence[LotQuota]
    limits: Limits
    global_batch: int
    micro_batches: Sequence[int]
    gpus: dict[str, float] = field(default_factory=dict)
    usd_per_s: dict[str, float] = field(default_factory=dict)
    work: float = 0.0
    """Table entries computed so far."""
    work_max: float = WORK_MAX
    gap: float = 0.0
    """The bound is tight enough within this share of a known plan's objective."""
    trips_max: float = TRIPS_TIMES * WORK_MAX
    """Table entries to compute for exact round trips; 0 for none."""
    told: Callable[[float], None] = lambda _: None
    """Progress callback: the share of the work that is done."""
    is_stopped: bool = False
    """Whether it was interrupted; bounds hold all the same."""
    _by_trips: str = "none"
    """Which round trips are counted: none, rough ones, or also exact ones."""
    _known_tariffs: dict[int, list[Tariff]] = field(default_factory=dict)
    _known_quickest: dict[int, float] = field(default_factory=dict)
    _known_trips: dict[tuple[int, int, int, bool], RoundTrips] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for lot in self.lots:
            self.gpus[lot.gpu] = self.gpus.get(lot.gpu, 0.0) + lot.gpus
            usd = max(lot.price_usd_per_gpu_hour or 0.0, FREE_USD_PER_HOUR) / 3600
            self.usd_per_s[lot.gpu] = min(usd, self.usd_per_s.get(lot.gpu, math.inf))
        for grant in self.grants:
            rest = sum(
                lot.gpus
                for index, lot in enumerate(self.lots)
                if lot.gpu == grant.gpu and index not in grant.lots
            )
            self.gpus[grant.gpu] = min(self.gpus[grant.gpu], rest + grant.gpus_max)

    def bounds(self, seconds: float, objective: float) -> Bounds:
        """Lower bounds, given the figures of a known plan."""
        if not self.limits.goal_is_cost:
            least = self.least(seconds, seconds, is_cost=False)
            return Bounds(least, least)
        seconds_work = self.work_max / 4
        if not self.gap:
            # Round trips raised none of five bounds in dollars that were tried; more spans did.
            self.work_max += self.trips_max
        usd = self.least(math.inf, objective, is_cost=True, trips=self.gap > 0)
        self.work_max = self.work + seconds_work
        return Bounds(self.least(seconds, seconds, is_cost=False, trips=False), usd)

    # -- spans ----------------------------------------------------------------------------------

    def least(self, longest_s: float, known: float, *, is_cost: bool, trips: bool = True) -> float:
        """Lower bound of the objective of plans up to ``longest_s``, at most ``known``.

        The exact round trips of pipelines raise it, if the work limit allows them.
        """
        start = min(self._quickest_s(b) for b in self.micro_batches)
        longest_s = min(longest_s, self.limits.seconds_max or math.inf)
        if is_cost:
            longest_s = min(longest_s, self._longest_s(known))
        if start >= longest_s:
            return known
        score = self._least_usd() if is_cost else start
        root = _Span(score, start, longest_s, self._every_family())
        found = self._examined(root, known, is_cost=is_cost)
        first_end, begin = self.work_max, self.work
        shares = {"rough": ROUGH_SHARE, "exact": 1 + ROUGH_SHARE} if trips else {}
        for by_trips, share in shares.items():
            if not self.trips_max or self.is_stopped or found >= known * (1 - self.gap):
                break
            low = max(start, found if not is_cost else 0.0)
            root = _Span(found, low, max(low, longest_s), self._every_family(), is_seen=True)
            self._by_trips, self.work_max = by_trips, begin + share * self.trips_max
            found = max(found, self._examined(root, known, is_cost=is_cost))
        self._by_trips, self.work_max = "none", max(first_end, self.work)
        return found

    def _examined(self, root: _Span, known: float, *, is_cost: bool) -> float:
        """Lower bound of the objective of plans in a span of time, at most ``known``."""
        queue = [root]
        while self.work < self.work_max and not self.is_stopped:
            if not queue or queue[0].score >= known:
                return known * (1 - ROUNDING)
            if queue[0].score >= known * (1 - self.gap):
                break
            span = heapq.heappop(queue)
            self.told(self.work / self.work_max)
            try:
                if not self._refine(span, queue, known, is_cost=is_cost):
                    break
            except KeyboardInterrupt:
                heapq.heappush(queue, span)
                self.is_stopped = True
        return min([known, *(span.score for span in queue[:1])]) * (1 - ROUNDING)

    def _refine(self, span: _Span, queue: list[_Span], known: float, *, is_cost: bool) -> bool:
        """Examine or halve a span; false, with the span back in the queue, if it is narrow."""
        if span.is_seen and span.high <= span.low * SPAN:
            heapq.heappush(queue, span)
            return False
        parts = (
            span.parts(is_cost=is_cost, step=math.inf if self._by_trips == "none" else TRIPS_STEP)
            if span.is_seen
            else (self._seen(span, known, is_cost=is_cost),)
        )
        for part in parts:
            if span.is_seen or part.score < known:
                heapq.heappush(queue, part)
        return True

    def _seen(self, span: _Span, known: float, *, is_cost: bool) -> _Span:
        """The span with the ranges that are possible in it, and its bound."""
        left: list[PipelineRange] = []
        least = math.inf
        waiting = list(reversed(span.families))
        while waiting:
            if self.work >= self.work_max:
                return span
            family = waiting.pop()
            usd_per_s = self._usd_per_s(family, span.low, span.high)
            score = usd_per_s * span.low if is_cost else span.low
            if usd_per_s == math.inf or score >= known:
                continue
            if family.most > NARROW * family.fewest:
                waiting += family.halves()
                continue
            if self._by_trips != "none" and family.fewest < family.most <= SINGLE_MAX:
                waiting += reversed(family.halves())
                continue
            for trips in self._trips_of(family):
                most = known / span.low if is_cost else math.inf
                by_trips = self._usd_by_trips(trips, family, span, most)
                usd_per_s = max(usd_per_s, by_trips)
                score = max(score, usd_per_s * span.low if is_cost else span.low)
                if usd_per_s == math.inf or score >= known:
                    break
            if usd_per_s == math.inf or score >= known:
                continue
            left.append(family)
            least = min(least, score)
            if not is_cost:
                # One possible range settles the span; the others are examined once it is ruled out.
                left += reversed(waiting)
                break
        return _Span(max(span.score, least), span.low, span.high, left, is_seen=True)

    def _usd_per_s(self, family: PipelineRange, low: float, high: float) -> float:
        """Least dollars per second of a range's plans in a span; infinite if none is possible."""
        b, total = family.micro_batch, self.global_batch // family.micro_batch
        if self._quickest_s(b) > high:
            return math.inf
        tables, least, tariffs = self.tables, 0.0, self._tariffs(b)
        counts = batch_counts(total - family.fewest + 1)
        most = tables.most(b, high, family.fewest, family.most)
        reach = Reach.of(most, counts)
        pipelines = np.arange(family.fewest, family.most + 1)
        possible = np.ones(len(pipelines), dtype=bool)
        if family.most > NARROW * family.fewest:
            tariffs = tariffs[:1]
        if self.limits.needs_prices:
            dollars = self._in_dollars(low)
            if len(self.gpus) == 1:
                # Dollars count the GPUs, too.
                most_usd = sum(count * self.usd_per_s[gpu] for gpu, count in self.gpus.items())
                tariffs = [replace(dollars, budget=min(dollars.budget, most_usd))]
            else:
                tariffs = [*tariffs, dollars]
        self.work += tables.table_size * (1 + len(tariffs))
        for tariff in tariffs:
            priced = self._priced(family, tariff, reach, high)
            price = priced.pipelines_price(pipelines, total) * (1 - ROUNDING)
            possible &= price <= tariff.budget
            if not possible.any():
                return math.inf
            if tariff is tariffs[-1] and self.limits.needs_prices:
                least = float(price[possible].min())
        return least

    def _stages_max(self, family: PipelineRange) -> int:
        """Most stages of a pipeline, where each other pipeline takes one smallest group."""
        tables = self.tables
        others = (family.fewest - 1) * min(choice.tp for choice in tables.choices)
        return min(tables.costs.layer_count, int(sum(self.gpus.values())) - others)

    def _priced(self, family: PipelineRange, tariff: Tariff, reach: Reach, high: float) -> Priced:
        tables, stages_max = self.tables, self._stages_max(family)
        floor = pipeline_prices(
            tables.times(family.micro_batch),
            tariff.prices,
            reach.counts,
            seconds=high,
            tail_s=tables.end_s(family.micro_batch, family.fewest, family.most),
            stages_max=stages_max,
            per_machine=max(lot.gpus_per_machine for lot in self.lots),
        )
        return reach.priced(tariff.prices, stages_max=stages_max, floor=floor)

    # -- round trips ----------------------------------------------------------------------------

    def _trips_of(self, family: PipelineRange) -> Iterator[RoundTrips]:
        """The round trips of a range's pipelines, rough and exact ones if they take little time."""
        for is_rough in {"none": (), "rough": (True,), "exact": (True, False)}[self._by_trips]:
            key = (family.micro_batch, family.fewest, family.most)
            if (*key, is_rough) not in self._known_trips:
                trips = RoundTrips.of(self.tables, *key, is_rough=is_rough)
                self._known_trips[*key, is_rough] = trips
                self.work += CASE_WORK * len(trips.cases) * len(self.tables.choices)
            trips = self._known_trips[*key, is_rough]
            tariff = self._tariffs(family.micro_batch)[0]
            highest = min(TRIPS_PRICE / family.fewest, 1.0) * tariff.budget
            stages_max = self._stages_max(family)
            entries = trips.entries(tariff.prices, highest, len(TRIPS_COUNTS), stages_max)
            if entries + self._share_work(family) <= self.trips_max:
                yield trips

    def _share_work(self, family: PipelineRange) -> float:
        """The work of sharing out all micro batches among the pipelines; none in a range."""
        total = self.global_batch // family.micro_batch
        doublings = family.fewest.bit_length() if family.fewest == family.most else 0
        return doublings * total * (SHARE_WORK + total / SHARE_PAIRS)

    def _usd_by_trips(
        self, trips: RoundTrips, family: PipelineRange, span: _Span, usd_per_s_max: float
    ) -> float:
        """``_usd_per_s`` of a narrow range, by round trips; infinite above ``usd_per_s_max``."""
        tried = self._tariffs(family.micro_batch)[:1]
        dollars = None
        if self.limits.needs_prices:
            dollars = self._in_dollars(span.low)
            dollars = replace(dollars, budget=min(dollars.budget, usd_per_s_max))
            if math.isfinite(dollars.budget):
                tried = [*tried, dollars]
        least = 0.0
        for tariff in tried:
            price = self._price_by_trips(trips, family, tariff, span.high) * (1 - ROUNDING)
            if price > tariff.budget:
                return math.inf
            least = price if tariff is dollars else 0.0
        return least

    def _price_by_trips(
        self, trips: RoundTrips, family: PipelineRange, tariff: Tariff, high: float
    ) -> float:
        """Lower bound of what the pipelines cost together.

        They divide the micro batches among themselves as cheaply as possible. A pipeline's price is
        computed only for some numbers of micro batches, until all in the cheapest division are
        known.
        """
        total = self.global_batch // family.micro_batch
        counts = batch_counts(total - family.fewest + 1)
        most = self.tables.most(family.micro_batch, high, family.fewest, family.most)
        reach = Reach.of(most, counts)
        priced = self._priced(family, tariff, reach, high)
        floor = priced.floor
        asked = _around(counts, total / family.most, total / family.fewest)
        solved, price = np.zeros(len(counts), dtype=bool), 0.0
        for _ in range(TRIPS_ROUNDS):
            highest = TRIPS_PRICE * tariff.budget / family.fewest
            dearest = floor[asked][np.isfinite(floor[asked])].max(initial=0.0)
            highest = max(min(highest, tariff.budget), dearest + 1.01 * tariff.prices.min())
            assert math.isfinite(highest), "a budget or a price is known"
            found, work = trips.prices(
                high,
                counts[asked],
                tariff.prices,
                highest=highest,
                stages_max=self._stages_max(family),
            )
            self.work += work
            floor = floor.copy()
            floor[asked] = np.maximum(floor[asked], found)
            floor = np.maximum.accumulate(floor)
            solved[asked] = True
            if family.fewest < family.most:
                pipelines = np.arange(family.fewest, family.most + 1)
                priced = replace(priced, floor=floor)
                return float(priced.pipelines_price(pipelines, total).min())
            self.work += self._share_work(family)
            price, shares = share_out(counts, floor, family.fewest, total)
            asked = np.array([n for n in shares if not solved[n]], dtype=np.int64)
            if price * (1 - ROUNDING) > tariff.budget or not len(asked):
                break
            if self.work >= self.work_max:
                break
        return price

    # -- prices ---------------------------------------------------------------------------------

    def _tariffs(self, micro_batch: int) -> list[Tariff]:
        """Prices of GPU kinds by their speed, and variations of these."""
        if micro_batch not in self._known_tariffs:
            times = self.tables.times(micro_batch)
            choices = times.choices
            speed = {}
            for gpu in self.gpus:
                rows = [c.tp * times.work[n] for n, c in enumerate(choices) if c.gpu == gpu]
                speed[gpu] = 1 / float(np.min(rows, axis=0).sum())
            tilted = [speed]
            if len(speed) > 1:
                tilted += [
                    {**speed, gpu: speed[gpu] * tilt} for gpu in sorted(speed) for tilt in TILTS
                ]
            self._known_tariffs[micro_batch] = [
                Tariff(
                    np.array([prices[c.gpu] * c.tp for c in choices]),
                    sum(prices[gpu] * count for gpu, count in self.gpus.items()),
                )
                for prices in tilted
            ]
        return self._known_tariffs[micro_batch]

    def _in_dollars(self, low: float) -> Tariff:
        """Dollars per second as prices, with the most that the limits allow."""
        o, usd_max = self.limits.objective, self.limits.usd_max
        budget = math.inf if usd_max is None else usd_max / low
        if o.max_usd_per_hour is not None:
            budget = min(budget, o.max_usd_per_hour / 3600)
        choices = self.tables.choices
        return Tariff(np.array([self.usd_per_s[c.gpu] * c.tp for c in choices]), budget)

    # -- where times begin and end --------------------------------------------------------------

    def _every_family(self) -> list[PipelineRange]:
        gpus = int(sum(self.gpus.values()))
        return [PipelineRange(b, 1, min(self.global_batch // b, gpus)) for b in self.micro_batches]

    def _quickest_s(self, micro_batch: int) -> float:
        """Time if all GPUs did the work they are best at, without any pause."""
        if micro_batch not in self._known_quickest:
            times = self.tables.times(micro_batch)
            total = self.global_batch // micro_batch
            self._known_quickest[micro_batch] = float(times.iteration_s.min()) + max(
                total * float((tariff.prices[:, None] * times.work).min(axis=0).sum())
                / tariff.budget
                for tariff in self._tariffs(micro_batch)
            )  # fmt: skip
        return self._known_quickest[micro_batch]

    def _least_usd(self) -> float:
        """Dollars if each layer ran on the option that is cheapest for it."""
        prices = self._in_dollars(1.0).prices[:, None]
        return min(
            self.global_batch // b * float((prices * self.tables.times(b).work).min(axis=0).sum())
            for b in self.micro_batches
        )

    def _longest_s(self, usd: float) -> float:
        """Time in which the cheapest pipeline that holds the model costs ``usd``."""
        prices = self._in_dollars(1.0).prices
        least, gpus = math.inf, int(sum(self.gpus.values()))
        for b in self.micro_batches:
            # With as many holders as there may be: under ZeRO-1 each keeps a share of the moments.
            most = self.tables.most(b, FOREVER_S, 1, gpus)
            stages_max = min(self.tables.costs.layer_count, gpus)
            priced = Reach.of(most, batch_counts(1)).priced(prices, stages_max=stages_max)
            least = min(least, float(priced.least[0]))
        return usd / least if least > 0 else math.inf


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """A span of time, and the ranges of plans that may be possible in it."""

    score: float
    low: float
    high: float
    families: list[PipelineRange]
    is_seen: bool = False

    def __lt__(self, other: _Span) -> bool:
        return (self.score, self.low) < (other.score, other.low)

    def parts(self, *, is_cost: bool, step: float) -> tuple[_Span, _Span]:
        """The span split at its geometric mean, or one step after its start."""
        middle = min(math.sqrt(self.low * self.high), self.low * step)
        late = self.score if is_cost else max(self.score, middle)
        return (
            _Span(self.score, self.low, middle, self.families),
            _Span(late, middle, self.high, self.families),
        )


def _around(counts: Ints, low: float, high: float) -> Ints:
    """Indices of some numbers of micro batches around averages in a range."""
    wanted = {max(1.0, share * (low if share <= 1 else high)) for share in TRIPS_COUNTS}
    return np.unique(np.searchsorted(counts, sorted(wanted), side="right") - 1)
