"""Plans of equal pipelines on one GPU kind, from a dynamic program over layers.

For each micro batch size and number of pipelines the program finds the stages that might be
quickest. Drafts of equal stages have few of them; these may have as many as the model has layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.pipelines.pipeline_mix import (
    PipelineMix,
    placements,
    room_for,
    take,
)
from planner.pipelines.pipeline_template import Template, TemplateMaker
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.inventory import Lot
from planner.search.drafts import FEW, SMALLER, EventDrafts
from planner.search.pricing import Reach
from planner.search.stage_limits import StageTimeTables
from simulator.arrays import Floats, Ints

TIMES = 12
"""Target times tried at once."""
SLOW = 100
"""Longest time tried where no plan is known, as a multiple of the work alone."""
PIPELINES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512, 1024)
"""Numbers of equal pipelines that are tried."""
KINDS_TRIED = 3
"""GPU kinds that are tried, those with the most GPUs first."""
BOUNDARIES_MAX = 40
"""Most layers of a model of which each may begin a stage; of twice as many every second one."""
TABLE_MAX = 600_000
"""With larger tables of stage times, the search would take too much time and memory."""
FOUND_MAX = 24
"""Templates that are kept of each set of lots and share of the GPUs."""
FEWER_TRIED = 8
"""Numbers of pipelines across lots that are tried, the largest first."""
SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the GPUs that are tried where dollars count."""


@dataclass(frozen=True, slots=True)
class EqualPipelines:
    """A template, the number of pipelines it was made for, and a time that they may reach."""

    seconds: float
    pipelines: int
    template: Template


@dataclass(frozen=True, slots=True, eq=False)
class EqualPipelineSearch:
    """A search on GPUs of one lot, for pipelines within ``longest_s``.

    Target times are tried until a pipeline costs no more than its share of the GPUs. Gradient sums
    and messages take their least times, which no placement gives to all stages at once. So the
    results are starting points, to be judged in each placement.
    """

    maker: TemplateMaker
    tables: StageTimeTables
    lot: int
    global_batch: int
    longest_s: float | None

    def best(self, micro_batches: Sequence[int], gpus: int, count: int) -> list[EqualPipelines]:
        """At most ``count`` results on so many GPUs, the quickest first.

        Besides templates with any TP degrees there are those in which all stages but the first and
        the last have the same: these fit machines evenly, so that ways are short.
        """
        families = [
            (b, pipelines)
            for b in micro_batches
            for pipelines in PIPELINES
            if pipelines <= min(self.global_batch // b, gpus)
        ]
        step = -(-self.tables.costs.layer_count // BOUNDARIES_MAX)
        free = quickest_first(x for each in families for x in self._quickest(*each, gpus, step))
        if not free and step > 1 and self.longest_s is None:
            # Perhaps not even two layers fit on a GPU.
            step = 1
            free = quickest_first(x for each in families for x in self._quickest(*each, gpus, step))
        free = free[:count]
        if len(self.tables.choices) == 1:
            return free
        alike = (
            one
            for each in free[: count // 2]
            for one in self._quickest(
                each.template.micro_batch, each.pipelines, gpus, step, each.seconds, is_alike=True
            )
        )
        return quickest_first([*free, *alike])[:count]

    def _quickest(
        self,
        micro_batch: int,
        pipelines: int,
        gpus: int,
        step: int,
        least_s: float = 0.0,
        *,
        is_alike: bool = False,
    ) -> Iterator[EqualPipelines]:
        """The quickest template, which takes at least ``least_s``; one at most.

        Of the inner layers every ``step``-th may begin a stage.
        With ``is_alike`` one for each TP degree of all stages but the first and the last.
        """
        tables = self.tables
        total = self.global_batch // micro_batch
        prices = np.array([float(choice.tp) for choice in tables.choices])
        work = tables.times(micro_batch).work
        least_work = float((prices[:, None] * work).min(axis=0).sum())
        count, budget = -(-total // pipelines), gpus / pipelines
        low = max(least_s, count * least_work / budget)
        high = SLOW * low if self.longest_s is None else min(SLOW * low, self.longest_s)
        if low > high:
            return
        at = boundaries(work.shape[1], step)
        stages_max = min(len(at) - 1, int(budget / prices.min() + 1e-9))
        seconds = stage_seconds(tables, micro_batch, count, pipelines, stages_max=stages_max, at=at)
        for inner in range(len(prices)) if is_alike else (None,):
            allowed = seconds
            if inner is not None:
                allowed = seconds.copy()
                allowed[:, np.arange(len(prices)) != inner, 1:, :-1] = np.inf
            found = least_time(allowed, prices, budget, low, high)
            if found is None:
                continue
            time_s, stages = found
            options = [tables.choices[choice] for choice, _, _ in stages]
            steps = tuple(TemplateStage(self.lot, one.tp, one.recompute) for one in options)
            template = self.maker.template(steps, micro_batch, total)
            if template is None:
                ends = (0, *(int(at[end]) for _, _, end in stages))
                template = self.maker.timed(steps, micro_batch, ends)
            yield EqualPipelines(time_s, pipelines, template)


def stage_seconds(
    tables: StageTimeTables,
    micro_batch: int,
    count: int,
    pipelines: int,
    *,
    stages_max: int,
    at: Ints,
) -> Floats:
    """Least seconds of stages for ``count`` micro batches, by [stages behind, choice, start, end].

    For one of ``pipelines`` pipelines of up to ``stages_max`` stages with boundaries among ``at``:
    start and end are indices into it. Infinite where memory is too small.
    """
    times = tables.times(micro_batch)
    again = tables.again.seconds(micro_batch, pipelines, pipelines)
    rest, room = tables.rest_and_room(micro_batch, pipelines)
    where = (..., at[:-1, None], at)
    stages = np.arange(min(stages_max, len(at) - 1))
    k = stages[:, None, None, None]
    if tables.again.is_chosen:
        again = again[where]
        again = again[np.minimum(np.minimum(count, stages + 1), len(again)) - 1]
    rest = rest[where]
    if len(rest) > 1:
        rest = rest[np.minimum(stages, len(rest) - 1)]
    forward, backward = times.forward[where], times.backward[where] + again
    behind = times.behind[:, None, at] + np.maximum(k - 1, 0) * times.hop_s
    spent = np.maximum(count - k - 1, 0) * forward + behind
    spent += forward + count * backward
    # Micro batch i returns before micro batch i + k + 1 starts.
    rounds = -(-count // (k + 1)) * (forward + times.inputs[where] + again + behind)
    np.maximum(spent, rounds, out=spent)
    spent[0] = 0.0
    np.maximum(spent, count * (forward + backward), out=spent)
    spent += rest
    spent[:, :, at[:-1, None] >= at] = np.inf
    seconds: Floats = np.where(room[where] >= np.minimum(count, k + 1), spent, np.inf)
    return seconds


def least_time(
    seconds: Floats, prices: Floats, budget: float, low: float, high: float
) -> tuple[float, tuple[tuple[int, int, int], ...]] | None:
    """The least time in a range in which a pipeline keeps to its budget, and its stages.

    ``seconds`` has the time of each stage by [stages behind, choice, start, end].
    """
    stages_max, _, layers, _ = seconds.shape
    by_end = np.ascontiguousarray(np.moveaxis(seconds, 3, 0))
    found = None
    for times in (1, TIMES, TIMES):
        tried = np.geomspace(low, high, times) if times > 1 else np.array([high])
        reached = np.stack([np.add.reduce(by_end <= x, dtype=np.int16) for x in tried], axis=3)
        furthest = np.where(reached > 0, np.arange(layers)[None, None, :, None] + reached, 0)
        priced = Reach(np.arange(times), furthest).priced(prices, stages_max=stages_max)
        enough = np.flatnonzero(priced.least <= budget * (1 + 1e-9))
        best = int(enough[0]) if len(enough) else 0
        stages = priced.cuts_of(best) if len(enough) else None
        if stages is None:
            break
        found = float(tried[best]), stages
        if times > 1:
            if best == 0:
                break
            low, high = float(tried[best - 1]), float(tried[best])
    return found


def boundaries(layers: int, step: int) -> Ints:
    """The boundaries that stages may have: the ends of the outer layers, and every ``step``-th."""
    return np.unique([*range(0, 2), *range(1 + step, layers - 1, step), layers - 1, layers])


def quickest_first(found: Iterable[EqualPipelines]) -> list[EqualPipelines]:
    """The quickest result for each template and number of pipelines, in their order."""
    kept: dict[object, EqualPipelines] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        kept.setdefault((one.template, one.pipelines), one)
    return list(kept.values())


def equal_mixes(drafts: EventDrafts, longest_s: float | None, count: int) -> Iterator[PipelineMix]:
    """The most promising mixes of equal pipelines, each in all placements.

    ``count`` of those on one set of lots, half as many on each of several.
    They might take ``longest_s`` at most, any time if that is ``None``.
    """
    each = [_mixes_on(drafts, lots, longest_s) for lots in _lots_tried(drafts.lots)]
    if drafts.limits.needs_prices:
        each = [drafts.ranked_in_placements([mix for some in each for mix in some])]
    for some in each:
        for mix in some[: -(-count // min(len(each), 2))]:
            yield from (mix, *placements(mix, drafts.lots))


def _mixes_on(
    drafts: EventDrafts, lots: Sequence[int], longest_s: float | None
) -> list[PipelineMix]:
    """Mixes of equal pipelines on lots of one GPU kind, the most promising first."""
    tables = StageTimeTables(
        drafts.maker,
        [drafts.lots[lot] for lot in lots],
        degrees=drafts.degrees,
        recompute=drafts.job.recompute,
        per_layer_sync=drafts.judge.overlaps,
    )
    if tables.table_size > TABLE_MAX:
        return []
    is_priced, gpus = drafts.limits.needs_prices, _gpus_of(drafts, lots)
    search = EqualPipelineSearch(drafts.maker, tables, lots[0], drafts.job.global_batch, longest_s)
    found: dict[PipelineMix, None] = {}
    for share in SHARES if is_priced else (1.0,):
        for one in search.best(drafts.drafted, math.ceil(share * gpus), FOUND_MAX):
            counts = _counts(one.pipelines) if is_priced else [one.pipelines]
            for count in counts:
                found |= dict.fromkeys(spread(drafts, one.template, count, lots))
    return list(found)


def _lots_tried(lots: Sequence[Lot]) -> list[tuple[int, ...]]:
    """For some GPU kinds all lots, the largest first, and the largest one alone."""
    kinds: dict[object, list[int]] = {}
    for index in sorted(range(len(lots)), key=lambda n: (-lots[n].gpus, n)):
        kinds.setdefault((lots[index].gpu, lots[index].machine), []).append(index)
    largest = sorted(kinds.values(), key=lambda some: -sum(lots[n].gpus for n in some))
    return [
        tried
        for some in largest[:KINDS_TRIED]
        for tried in dict.fromkeys([tuple(some), tuple(some[:1])])
    ]


def _gpus_of(drafts: EventDrafts, lots: Sequence[int]) -> int:
    """The GPUs of these lots that quotas and a limit in dollars per hour let a plan use."""
    gpus = float(sum(drafts.lots[n].gpus for n in lots))
    for grant in drafts.grants:
        free = sum(drafts.lots[n].gpus for n in lots if n not in grant.lots)
        gpus = min(gpus, free + grant.gpus_max)
    hourly = drafts.limits.objective.max_usd_per_hour
    price = min(drafts.lots[n].price_usd_per_gpu_hour or 0.0 for n in lots)
    if hourly is not None and price > 0:
        gpus = min(gpus, hourly / price)
    return max(1, int(gpus))


def _counts(pipelines: int) -> list[int]:
    """Numbers of pipelines that are tried of a template where dollars count."""
    fewer = [math.ceil(share * pipelines) for share in SMALLER]
    return list(dict.fromkeys([pipelines, *fewer, *(n for n in FEW if n < pipelines)]))


def spread(
    drafts: EventDrafts, template: Template, count: int, lots: Sequence[int]
) -> Iterator[PipelineMix]:
    """So many pipelines, or as many as there is room for, on lots of one kind.

    First with whole pipelines in each lot, and what is left across them; then with all pipelines
    across lots at the same stages.
    """
    count = min(count, drafts.job.global_batch // template.micro_batch)
    taken: dict[int, dict[int, int]] = {}
    parts: dict[Template, int] = {}
    for lot in lots:
        here = _on_lots(drafts.maker, template, [lot] * len(template.stages))
        room = room_for(here, drafts.lots, taken, drafts.grants)
        number = min(room, count - sum(parts.values()))
        if number > 0:
            parts[here] = number
            take(taken, here, number)
    left = count - sum(parts.values())
    if left and len(lots) > 1:
        parts.update(_across(drafts, template, left, lots, taken))
    if parts:
        yield PipelineMix(tuple(parts), tuple(parts.values()))
    if len(lots) > 1:
        crossing = _across(drafts, template, count, lots, {})
        yield from (PipelineMix((each,), (number,)) for each, number in crossing.items())


def _across(
    drafts: EventDrafts,
    template: Template,
    count: int,
    lots: Sequence[int],
    taken: Mapping[int, Mapping[int, int]],
) -> dict[Template, int]:
    """The template with its stages on one lot after the other, and for how many pipelines."""
    for number in range(count, max(0, count - FEWER_TRIED), -1):
        used = {lot: dict(taken.get(lot, {})) for lot in lots}
        places: list[int] = []
        at = 0
        for stage in template.stages:
            while at < len(lots):
                groups = used[lots[at]]
                more = {**groups, stage.tp: groups.get(stage.tp, 0) + number}
                if drafts.lots[lots[at]].holds(more):
                    used[lots[at]] = more
                    places.append(lots[at])
                    break
                at += 1
        if len(places) == len(template.stages):
            crossing = _on_lots(drafts.maker, template, places)
            if room_for(crossing, drafts.lots, taken, drafts.grants) >= number:
                return {crossing: number}
    return {}


def _on_lots(maker: TemplateMaker, template: Template, lots: Sequence[int]) -> Template:
    stages = tuple(
        replace(stage, lot=lot) for stage, lot in zip(template.stages, lots, strict=True)
    )
    if stages == template.stages:
        return template
    return maker.timed(stages, template.micro_batch, template.cuts)
