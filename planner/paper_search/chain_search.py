"""Finds the best chains: ranks many roughly, cuts the best exactly, then changes them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.paper_search.chains import Cut, OptionTables
from planner.paper_search.formula_tables import PaperModel
from planner.paper_search.layouts import layouts
from planner.pipelines.pipeline_template import NEVER_S
from planner.pipelines.plan_shape import PlanShape
from planner.problem.objective import ObjectiveArrays
from simulator.arrays import Floats, Ints

REPEATS = (1, 2, 3, 4, 6, 9, 13, 19, 28, 40, 60)
"""Lengths of a group of equal stages."""
SHARES = (np.inf, 1.6, 1.25, 1.05)
SHARES_FINE = (np.inf, 2.5, 2.0, 1.75, 1.6, 1.5, 1.4, 1.3, 1.25, 1.2, 1.15, 1.1, 1.05, 1.0)
"""Limits of what a stage synchronises, as multiples of an equal share."""
ROUNDS = 6
CUT_PER_ROUND = 120
ROUGH_SLACK = 1.25
VARIED = 0.02
"""Penalty per better chain of equal length."""
STEPS_BACK = (0, 1, 2)
STEPS_BACK_MONEY = (0, 1, 2, 3, 5, 8, 12, 17, 23, 30, 40, 52, 65, 80)
"""Numbers of pipelines to try, as steps down from the largest possible."""
STEPS_AROUND = (-2, -1, 0, 1, 2)
STEPS_AROUND_MONEY = (-6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6)
"""Numbers of pipelines judged exactly, as steps around the best rough one."""
CUT = 10
IMPROVED = 4
FIRST = 24
BEAM = 12
"""By layout and micro batch size, ``FIRST`` chains are cut and ``BEAM`` are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class RankedChain:
    """A chain with boundaries and its score."""

    score: float
    terms: OptionTables
    chain: tuple[int, ...]
    starts: tuple[int, ...]
    replicas: int

    def shape(self) -> PlanShape | None:
        """The plan in short form; ``None`` if its replicas do not fit the machines."""
        return self.terms.shape(np.array(self.chain), np.array(self.starts), self.replicas)


@dataclass(slots=True, eq=False)
class ChainSearch:
    """Search over the chains of one option table."""

    terms: OptionTables
    counts: Ints
    """Numbers of pipelines that are worth trying, ascending."""
    steps_back: tuple[int, ...]
    steps_around: tuple[int, ...]
    scores: ObjectiveArrays
    beam: int
    chains: Ints = field(init=False)
    estimates: Floats = field(init=False)
    indices: Ints = field(init=False)

    def refined(self, found: Sequence[RankedChain]) -> list[RankedChain]:
        """The same chains with boundaries from a finer choice of limits."""
        chains = self._pad([candidate.chain for candidate in found])
        counts = [candidate.replicas for candidate in found]
        return self.cut(chains, np.searchsorted(self.counts, counts), SHARES_FINE)

    def first(self) -> float:
        """Estimate all chains of one or two groups of equal stages; return the best score."""
        self.chains = self._few_groups()
        self.estimates, self.indices = self.rough(self.chains)
        return float(self.estimates.min(initial=np.inf))

    def best_first(self, kept: int, at_most: float) -> list[RankedChain]:
        """The chains with the best estimates, with boundaries."""
        order = np.argsort(self.estimates, kind="stable")[:kept]
        order = order[self.estimates[order] <= at_most * ROUGH_SLACK]
        return self.cut(self.chains[order], self.indices[order])

    def cut(
        self, chains: Ints, indices: Ints, shares: tuple[float, ...] = SHARES
    ) -> list[RankedChain]:
        """Chains with their best boundaries, best first."""
        if not len(chains):
            return []
        width = int((chains >= 0).sum(axis=1).max())
        chains = chains[:, :width]
        at = indices[:, None] + np.array(self.steps_around)
        last = len(self.counts) - 1
        possible = (at >= 0) & (at <= np.minimum(self._index(chains), last)[:, None])
        replicas = np.where(possible, self.counts[np.clip(at, 0, last)], 0)
        return self._candidates(self.terms.cut(chains, replicas, shares))

    def _candidates(self, cut: Cut) -> list[RankedChain]:
        score = self.scores.exact(cut.seconds, cut.usd_per_s, cut.egress_usd)
        found: dict[tuple[int, ...], RankedChain] = {}
        for n in np.argsort(score, kind="stable").tolist():
            if not np.isfinite(score[n]) or len(found) == self.beam:
                break
            chain = tuple(o for o in cut.chains[n].tolist() if o >= 0)
            if chain not in found:
                starts = tuple(cut.starts[n].tolist())[: len(chain)]
                found[chain] = RankedChain(
                    float(score[n]), self.terms, chain, starts, int(cut.replicas[n])
                )
        return list(found.values())

    def improve(self, start: Sequence[RankedChain]) -> list[RankedChain]:
        """Change stages of the best chains while that helps."""
        beam = list(start[: self.beam])
        seen = {candidate.chain for candidate in beam}
        for _ in range(ROUNDS if beam else 0):
            tried = [
                chain
                for chain in dict.fromkeys(
                    changed for one in beam for changed in self._change_chain(one.chain)
                )
                if chain not in seen
            ]
            if not tried:
                break
            seen.update(tried)
            chains = self._pad(tried)
            rough, indices = self.rough(chains)
            order = np.argsort(rough, kind="stable")[:CUT_PER_ROUND]
            order = order[rough[order] <= beam[0].score * ROUGH_SLACK]
            better = self.cut(chains[order], indices[order])
            merged = sorted([*beam, *better], key=lambda c: c.score)[: self.beam]
            if merged[0].score >= beam[0].score * (1 - 1e-9):
                beam = merged
                break
            beam = merged
        return beam

    # -- estimates ------------------------------------------------------------------------------

    def rough(self, chains: Ints) -> tuple[Floats, Ints]:
        """Estimate the score of chains with divisible layers, at their best number of pipelines."""
        terms = self.terms
        stages = (chains >= 0).sum(axis=1)
        index = self._index(chains)
        sends = terms.sent_s(chains, stages)
        level = terms.rough_level(chains, sends)
        used = chains >= 0
        pace = terms.seconds[:, -1] / terms.model.layers
        # A chain over a link of unknown speed is impossible.
        known = used & np.isfinite(sends) & np.isfinite(level)[:, None]
        spare = np.subtract(level[:, None], sends, out=np.zeros(sends.shape), where=known)
        share = np.maximum(spare, 0) / pace[chains]
        room = np.where(
            used, self._most_layers(chains.shape[1])[np.arange(chains.shape[1]), chains], 0
        )
        possible = (room.sum(axis=1) >= terms.model.layers) & (index >= 0) & np.isfinite(level)
        bytes_each = float(terms.model.gradient_bytes()[-1]) / terms.model.layers
        held = share * bytes_each / terms.sharing[chains]
        usd = np.where(used, terms.usd_per_s[chains], 0.0).sum(axis=1)
        rates = self._sync_rates()
        best, indices = np.full(len(chains), np.inf), np.zeros(len(chains), dtype=np.int64)
        for back in self.steps_back:
            at = np.maximum(index - back, 0)
            count = self.counts[at]
            batches = -(-terms.total // count)
            rate = rates[at[:, None], chains]
            sync = np.multiply(held, rate, out=np.zeros(held.shape), where=held > 0).max(axis=1)
            seconds = np.where(
                possible & (index >= back), (batches - 1 + stages) * level + sync, np.inf
            )
            score = self.scores.rough(seconds, usd * count)
            indices = np.where(score < best, at, indices)
            best = np.minimum(best, score)
        return best, indices

    def _index(self, chains: Ints) -> Ints:
        """Index of the largest count that fits the lot groups; -1 where there is none."""
        most = self.terms.most_replicas(self.terms.usage(chains))
        return np.searchsorted(self.counts, most, side="right") - 1

    def _sync_rates(self) -> Floats:
        """[count, option]: seconds per byte of a synchronisation of typical size."""
        terms = self.terms
        size = np.array(float(terms.model.gradient_bytes()[-1]) / 8)
        replicas = self.counts[:, None].astype(float)
        found = terms.ring_s(
            terms.resource[None, :], np.broadcast_to(size, (1, len(terms.tp))), replicas
        )
        return np.where(replicas > 1, np.minimum(found / size, NEVER_S), 0.0)

    def _most_layers(self, width: int) -> Ints:
        """[stages left, option]: the most layers that memory holds."""
        ends = np.arange(self.terms.model.layers + 1)
        return np.stack([(ends - self.terms.memory_start(n + 1)).max(axis=1) for n in range(width)])

    # -- which chains ---------------------------------------------------------------------------

    def _few_groups(self) -> Ints:
        """Chains of one or two groups of equal stages that fit the lot groups."""
        terms, layers = self.terms, self.terms.model.layers
        option, repeat = (
            np.array(
                [
                    (option, repeat)
                    for option, (resource, tp) in enumerate(terms.options)
                    for repeat in REPEATS
                    if repeat <= min(terms.gpus[:, resource].max() // tp, layers)
                ],
                dtype=np.int64,
            )
            .reshape(-1, 2)
            .T
        )
        one, other = np.nonzero(option[:, None] < option[None, :])
        fine = repeat[one] + repeat[other] <= layers
        one, other = one[fine], other[fine]
        options = np.stack(
            [np.concatenate([option, option[one]]), np.concatenate([option, option[other]])], axis=1
        )
        ends = np.stack(
            [
                np.concatenate([repeat, repeat[one]]),
                np.concatenate([repeat, repeat[one] + repeat[other]]),
            ],
            axis=1,
        )
        tp = terms.tp[options]
        length = np.diff(ends, axis=1, prepend=0)
        usage = np.stack(
            [
                np.where(terms.resource[options] == r, tp * length, 0.0).sum(axis=1)
                for r in terms.layout.resources
            ],
            axis=1,
        )
        held = terms.most_replicas(usage) > 0
        options, ends = options[held], ends[held]
        if not len(ends):
            return np.empty((0, 1), dtype=np.int64)
        at = np.arange(int(ends[:, -1].max()))[None, :]
        first = np.where(at < ends[:, :1], options[:, :1], options[:, 1:])
        return np.where(at < ends[:, 1:], first, -1)

    @staticmethod
    def _pad(chains: Sequence[tuple[int, ...]]) -> Ints:
        width = max(map(len, chains))
        return np.array([[*chain, *[-1] * (width - len(chain))] for chain in chains])

    def _change_chain(self, chain: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Chains with one stage more, less, or changed, or with two stages swapped."""
        options = range(len(self.terms.options))
        for at in range(len(chain)):
            if len(chain) > 1:
                yield (*chain[:at], *chain[at + 1 :])
            for option in options:
                if option != chain[at]:
                    yield (*chain[:at], option, *chain[at + 1 :])
        if len(chain) < self.terms.model.layers:
            for at in range(len(chain) + 1):
                for option in options:
                    yield (*chain[:at], option, *chain[at:])
        for a, b in itertools.combinations(range(len(chain)), 2):
            if chain[a] != chain[b]:
                swapped = list(chain)
                swapped[a], swapped[b] = swapped[b], swapped[a]
                yield tuple(swapped)


def best_chains(
    model: PaperModel,
    scores: ObjectiveArrays,
    *,
    micro_batches: Sequence[int],
    degrees: tuple[int, ...],
    replica_counts: Callable[[int], list[int]],
    effort: Callable[[int], int],
) -> list[RankedChain]:
    """The best chains over all layouts and micro batch sizes, best first."""
    searches = []
    for layout in layouts(model, counts_money=scores.limits.needs_prices):
        for micro_batch in micro_batches:
            terms = OptionTables(model, layout, micro_batch, degrees)
            if terms.options:
                search = ChainSearch(
                    terms,
                    np.array(replica_counts(micro_batch)),
                    STEPS_BACK_MONEY if scores.limits.needs_prices else STEPS_BACK,
                    STEPS_AROUND_MONEY if scores.limits.needs_prices else STEPS_AROUND,
                    scores,
                    effort(min(BEAM, 2 * len(terms.options))),
                )
                searches.append((search.first(), search))
    searches.sort(key=lambda pair: pair[0])
    best = np.inf
    firsts = []
    for rough, search in searches[: effort(CUT)]:
        if rough > best * ROUGH_SLACK:
            break
        first = search.best_first(effort(FIRST), best)
        if first:
            firsts.append((first[0].score, search, first))
            best = min(best, first[0].score)
    firsts.sort(key=lambda each: each[0])
    found: list[RankedChain] = []
    for number, (_, search, first) in enumerate(firsts):
        found += search.refined(search.improve(first)) if number < effort(IMPROVED) else first
    return _rank_varied(found)


def _rank_varied(found: Sequence[RankedChain]) -> list[RankedChain]:
    """Best first, with a penalty for many chains of equal length and micro batch size."""
    rank: Counter[tuple[int, int]] = Counter()
    ranked: list[tuple[float, int, RankedChain]] = []
    for candidate in sorted(found, key=lambda c: c.score):
        alike = (candidate.terms.micro_batch, len(candidate.chain))
        ranked.append((candidate.score * (1 + VARIED * rank[alike]), len(ranked), candidate))
        rank[alike] += 1
    return [candidate for *_, candidate in sorted(ranked)]
