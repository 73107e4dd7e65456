"""Chains: the option of each stage of a pipeline, equal for all replicas, with the best boundaries.

Once the options are known, so are all messages. The least time limit that a chain can keep follows
from taking as many layers as the limit allows, from the last stage backwards. Many chains are cut
at once, as rows of arrays. A chain is a row of option numbers *from its last stage to its first*,
padded with -1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from planner.paper_search.formula_tables import (
    LAYER_ROUNDING,
    LinkNumbers,
    PaperModel,
    ring_seconds,
)
from planner.paper_search.layouts import Layout, Lots, dealt_runs
from planner.pipelines.plan_shape import PlanShape, Run
from simulator.arrays import Bools, Floats, Ints
from simulator.estimate.paper_formula import MOST_TP_SHARING_GRADIENTS, overhead_bytes

HALVINGS = 9
"""Bisection steps for a chain's time limit."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Chains with their boundaries and the formula's results."""

    chains: Ints
    """[chain, stage from the last]."""
    starts: Ints
    """[chain, stage from the last]: first layers."""
    replicas: Ints
    seconds: Floats
    usd_per_s: Floats
    egress_usd: Floats


class OptionTables:
    """Per-option tables for one layout and micro batch."""

    def __init__(
        self, model: PaperModel, layout: Layout, micro_batch: int, degrees: tuple[int, ...]
    ) -> None:
        self.model, self.layout, self.micro_batch = model, layout, micro_batch
        self.total = model.global_batch // micro_batch
        self.options = [
            (resource, tp)
            for resource in layout.resources
            for tp in degrees
            if any(model.lots[k].room(tp) for k in layout.lots(resource))
            and model.measured(layout.lots(resource)[0], tp, micro_batch)
        ]
        if not self.options:
            return
        self.resource = np.array([resource for resource, _ in self.options])
        self.tp = np.array([float(tp) for _, tp in self.options])
        first = [layout.lots(resource)[0] for resource, _ in self.options]
        lots = [model.lots[k] for k in first]
        timed = [(lot.gpu, tp) for lot, (_, tp) in zip(lots, self.options, strict=True)]
        self.seconds = np.array([model.seconds(gpu, tp, micro_batch) for gpu, tp in timed])
        self.update_s = np.array([model.update_s(gpu, tp, micro_batch) for gpu, tp in timed])
        self.capacity = np.array([model.capacity_bytes[k] for k in first])
        self.capacity -= [overhead_bytes(tp) for _, tp in self.options]
        self.usd_per_s = self.tp * [(lot.price_usd_per_gpu_hour or 0.0) / 3600 for lot in lots]
        sizes = {model.output_bytes(cut, micro_batch) for cut in range(1, model.layers)}
        self.sent_bytes = max(sizes, default=0.0)
        self.send_s, self.send_usd = self._sends()
        self.sharing = np.minimum(self.tp, MOST_TP_SHARING_GRADIENTS)
        self.gpus = np.array(
            [
                [sum(model.lots[k].gpus for k in lots) for lots in lot_group]
                for lot_group in layout.lot_groups
            ]
        )
        self.links = [self._ring_links(resource) for resource in layout.resources]
        self.ring_usd = self._ring_usd()
        self._stride = float(self.seconds[:, -1].max()) * 2 + 1.0
        self._flat = (self.seconds + self._stride * np.arange(len(self.options))[:, None]).ravel()
        self._memory: list[Ints] = []

    def _sends(self) -> tuple[Floats, Floats]:
        """Worst seconds and mean dollars of a message between options."""
        count = len(self.options)
        seconds, usd = np.zeros((count, count)), np.zeros((count, count))
        rates: dict[tuple[int, int], float] = {}
        for one, other in itertools.product(self.layout.resources, repeat=2):
            pairs = [
                pair
                for lot_group in self.layout.lot_groups
                for pair in itertools.product(lot_group[one], lot_group[other])
            ]
            rate = [self.model.egress_usd_per_byte(*pair) for pair in pairs]
            rates[one, other] = sum(rate) / max(1, len(rate)) * self.sent_bytes
            for i, j in itertools.product(range(count), repeat=2):
                if (self.options[i][0], self.options[j][0]) == (one, other):
                    tp, tp_other = self.options[i][1], self.options[j][1]
                    seconds[i, j] = max(
                        (self.model.send_s(a, tp, b, tp_other, self.sent_bytes) for a, b in pairs),
                        default=0.0,
                    )
                    usd[i, j] = rates[one, other]
        return seconds, usd

    def _ring_links(self, resource: int) -> list[LinkNumbers]:
        """Curves between neighbours of a ring, which visits the lot groups in order."""
        lots = self.layout.lots(resource)
        ends = [(self.model.lots[k].zone, self.model.lots[k].gpu) for k in lots]
        found: dict[LinkNumbers, None] = {}
        for one, other in [(e, e) for e in ends] + list(itertools.pairwise(ends)):
            curve = self.model.network.measured.raw_between.get((one, other), {}).get((1, 1))
            if curve is None or curve.polynomial is None:
                found[0.0, 0.0, 0.0] = None  # Unknown speed: the ring takes infinite time.
            else:
                found[curve.polynomial] = None
        return list(found)

    def _ring_usd(self) -> float:
        """Dollars per byte of a ring over all lot groups, for one replica's share."""
        lots = [next(k for lots in lot_group for k in lots) for lot_group in self.layout.lot_groups]
        return sum(
            self.model.egress_usd_per_byte(one, other)
            for one, other in zip(lots, [*lots[1:], lots[0]], strict=True)
        )

    def ring_s(self, resource: Ints, size: Floats, replicas: Floats) -> Floats:
        """Seconds to synchronise ``size`` bytes between replicas on a resource."""
        found = np.zeros(np.broadcast_shapes(resource.shape, size.shape, replicas.shape))
        for index, links in enumerate(self.links):
            here = resource == index
            if not here.any():
                continue
            for link in links:
                # A link of unknown speed makes the time infinite, except for a single replica.
                around = np.where(replicas > 1, ring_seconds(link, size, replicas), 0.0)
                found = np.where(here, np.maximum(found, around), found)
        return found

    def usage(self, chains: Ints) -> Floats:
        """[chain, resource]: GPUs of one pipeline."""
        tp = np.where(chains >= 0, self.tp[chains], 0.0)
        return np.stack(
            [
                np.where(self.resource[chains] == r, tp, 0.0).sum(axis=1)
                for r in self.layout.resources
            ],
            axis=1,
        )

    def most_replicas(self, usage: Floats) -> Ints:
        """Pipelines of this usage that fit the lot groups."""
        found = np.zeros(len(usage), dtype=np.int64)
        for row in self.gpus:
            with np.errstate(divide="ignore", invalid="ignore"):
                each = np.where(usage > 0, row // usage, np.inf)
            found += np.minimum(each.min(axis=1), self.total).astype(np.int64)
        return np.minimum(found, self.total)

    # -- boundaries -----------------------------------------------------------------------------

    def cut(self, chains: Ints, replicas: Ints, shares: tuple[float, ...]) -> Cut:
        """The best boundaries and number of pipelines of each chain.

        ``replicas`` has the numbers to choose from, [chain, choice], 0 where there is none. Stages
        may synchronise at most a multiple of what they would if all took equally long; each such
        multiple in ``shares`` is tried.
        """
        stages = (chains >= 0).sum(axis=1)
        sends = self.sent_s(chains, stages)
        whole = float(self.model.gradient_bytes()[-1])
        scale = whole / stages[:, None] * self._sync_scale(chains)
        scale = np.maximum(scale, 1.0)
        size = np.concatenate([scale * share for share in shares])
        ways = len(shares)
        starts, possible = self._find_least_level(
            np.tile(chains, (ways, 1)), np.tile(stages, ways), np.tile(sends, (ways, 1)), size
        )
        # Rows are now (share, chain); each is judged with all choices of replicas.
        choices = replicas.shape[1]
        return self.judge(
            np.tile(chains, (ways * choices, 1)),
            np.tile(starts, (choices, 1)),
            np.repeat(replicas.T, ways, axis=0).ravel(),
            np.tile(possible, choices),
        )

    def _sync_scale(self, chains: Ints) -> Floats:
        """Bytes that a stage synchronises while the slowest synchronises its equal share."""
        speed = np.array([max(1e-3, min(link[2] for link in links)) for links in self.links])
        rate = np.where(chains >= 0, speed[self.resource[chains]] * self.sharing[chains], 0.0)
        found: Floats = rate / (rate.sum(axis=1) / (chains >= 0).sum(axis=1))[:, None]
        return found

    def sent_s(self, chains: Ints, stages: Ints) -> Floats:
        """[chain, stage from the last]: seconds of messages within a stage's level."""
        found = np.zeros(chains.shape)
        count = chains.shape[1]
        for left in range(count):
            own = chains[:, left]
            ahead = self.send_s[own, chains[:, left - 1]] if left else 0.0
            back = self.send_s[own, chains[:, left + 1]] if left + 1 < count else 0.0
            first, last = stages == left + 1, left == 0
            inner = ahead + back if not last else 2 * back
            at_first = ahead * np.where(stages <= 3, 1, 2)
            found[:, left] = np.where(first, np.where(stages == 1, 0.0, at_first), inner)
        return np.where(chains >= 0, found, 0.0)

    def _find_least_level(
        self, chains: Ints, stages: Ints, sends: Floats, size: Floats
    ) -> tuple[Ints, Bools]:
        """Bisect the least time limit under which the layers fit."""
        rough = self.rough_level(chains, sends)
        starts = np.zeros(chains.shape, dtype=np.int64)
        possible = np.zeros(len(chains), dtype=bool)
        low, high = np.zeros(len(chains)), np.full(len(chains), np.inf)
        middle = rough * 1.1
        for _ in range(HALVINGS):
            tried, fine = self._lay(chains, stages, middle, sends, size)
            starts = np.where(fine[:, None], tried, starts)
            possible |= fine
            high = np.where(fine, middle, high)
            low = np.where(fine, low, middle)
            beyond = np.where(middle < rough * 1.7, middle * 1.25, middle * 2.5)
            middle = np.where(np.isfinite(high), np.maximum((low + high) / 2, 0.97 * high), beyond)
            middle = np.where(
                np.isfinite(high) & (low == 0), np.maximum(0.92 * high, middle), middle
            )
        return starts, possible

    def rough_level(self, chains: Ints, sends: Floats) -> Floats:
        """Time limit under which the layers would fit if they were divisible."""
        pace = self.seconds[:, -1] / self.model.layers
        one = np.where(chains >= 0, 1 / pace[chains], 0.0)
        with np.errstate(invalid="ignore"):
            spent = np.where(chains >= 0, sends * one, 0.0).sum(axis=1)
        found: Floats = (self.model.layers + spent) / one.sum(axis=1)
        return found

    def _lay(
        self, chains: Ints, stages: Ints, level: Floats, sends: Floats, size: Floats
    ) -> tuple[Ints, Bools]:
        """First layers of stages that take as many layers as possible, last stage first."""
        layers, gradient = self.model.layers, self.model.gradient_bytes()
        starts = np.zeros(chains.shape, dtype=np.int64)
        end = np.full(len(chains), layers)
        possible = np.isfinite(level)
        for left in range(chains.shape[1]):
            own = chains[:, left]
            active = own >= 0
            budget = level - sends[:, left]
            reach = self._flat[own * (layers + 1) + end] - np.maximum(budget, 0.0) * (
                1 + LAYER_ROUNDING
            )
            lowest = own * self._stride
            start = np.searchsorted(self._flat, np.maximum(reach, lowest)) - own * (layers + 1)
            start = np.maximum(start, self.memory_start(left + 1)[own, end])
            if np.isfinite(size).any():
                held = gradient[end] - size[:, left] * (1 + LAYER_ROUNDING)
                start = np.maximum(start, np.searchsorted(gradient, held))
            start = np.maximum(start, stages - left - 1)
            possible &= ~active | ((start < end) & (budget > 0))
            possible &= (stages != left + 1) | (start <= 0)
            start = np.where(active, np.minimum(start, end), 0)
            starts[:, left] = start
            end = np.where(active, start, end)
        return starts, possible

    def memory_start(self, left: int) -> Ints:
        """[option, end]: first layer from which memory suffices, with ``left`` stages left."""
        while len(self._memory) < left:
            following = len(self._memory) + 1
            rows = []
            for (_, tp), most in zip(self.options, self.capacity, strict=True):
                row = self.model.memory(tp, self.micro_batch, following)
                rows.append(np.searchsorted(row, row - most * (1 - LAYER_ROUNDING)))
            self._memory.append(np.array(rows))
        return self._memory[left - 1]

    def judge(self, chains: Ints, starts: Ints, replicas: Ints, possible: Bools) -> Cut:
        """The formula on chains with given boundaries; infinite time where impossible."""
        layers = self.model.layers
        stages = (chains >= 0).sum(axis=1)
        ends = np.concatenate([np.full((len(chains), 1), layers), starts[:, :-1]], axis=1)
        used = chains >= 0
        ends = np.where(used, ends, 0)
        begins = np.where(used, starts, 0)
        compute = self.seconds[chains, ends] - self.seconds[chains, begins]
        levels = np.where(used, compute + self.sent_s(chains, stages), 0.0)
        gradient = self.model.gradient_bytes()
        size = (gradient[ends] - gradient[begins]) / self.sharing[chains]
        count = np.maximum(replicas, 1)[:, None].astype(float)
        sync = np.where(used, self.ring_s(self.resource[chains], size, count), 0.0).max(axis=1)
        update = np.where(used, self.update_s[chains], 0.0).max(axis=1)
        most = -(-self.total // np.maximum(replicas, 1))
        seconds = (most - 1) * levels.max(axis=1) + levels.sum(axis=1) + sync + update
        seconds = np.where(possible & (replicas > 0), seconds, np.inf)
        usd = np.where(used, self.usd_per_s[chains], 0.0).sum(axis=1) * replicas
        sent = np.where(
            used[:, 1:],
            self.send_usd[chains[:, 1:], chains[:, :-1]]
            + self.send_usd[chains[:, :-1], chains[:, 1:]],
            0.0,
        )
        egress = sent.sum(axis=1) * self.total
        if self.ring_usd:
            egress = egress + self.ring_usd * 2 * (replicas - 1) / np.maximum(replicas, 1) * float(
                gradient[-1]
            )
        return Cut(chains, starts, replicas, seconds, usd, egress)

    # -- plans ----------------------------------------------------------------------------------

    def shape(self, chain: Ints, starts: Ints, replicas: int) -> PlanShape | None:
        """A chain as a shape: each lot group runs as many of the pipelines as fit."""
        row = [int(o) for o in chain if o >= 0][::-1]
        cuts = (*(int(s) for s in starts[: len(row)][::-1]), self.model.layers)
        columns: list[list[Run]] = [[] for _ in row]
        left = replicas
        for lot_group in self.layout.lot_groups:
            count, runs = self._deal_most(lot_group, row, left)
            for column, more in zip(columns, runs, strict=True):
                column.extend(more)
            left -= count
        if left:
            return None
        return PlanShape(self.micro_batch, cuts, tuple(map(tuple, columns)))

    def _deal_most(
        self, lot_group: tuple[Lots, ...], row: list[int], most: int
    ) -> tuple[int, list[list[Run]]]:
        """As many of the pipelines as a lot group's machines hold."""
        low = 0
        runs: list[list[Run]] = [[] for _ in row]
        while low < most:
            middle = (low + most + 1) // 2
            dealt = self._deal(lot_group, row, middle)
            if dealt is None:
                most = middle - 1
            else:
                low, runs = middle, dealt
        return low, runs

    def _deal(
        self, lot_group: tuple[Lots, ...], row: list[int], count: int
    ) -> list[list[Run]] | None:
        """Runs of each stage, large groups first, so that they fit whole machines."""
        order = sorted(range(len(row)), key=lambda s: -self.options[row[s]][1])
        options = ((s, *self.options[row[s]]) for s in order)
        wanted = ((s, tp, count, lot_group[resource]) for s, resource, tp in options)
        return dealt_runs(self.model.lots, wanted, len(row))
