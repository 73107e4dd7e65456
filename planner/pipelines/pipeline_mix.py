"""Pipeline mixes: how many pipelines of which template, and how micro batches are shared out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from planner.pipelines.pipeline_template import Template, TemplateMaker
from planner.pipelines.plan_shape import PlanShape
from planner.pipelines.stage_memory import TemplateStage
from planner.problem.inventory import Lot, LotQuota, lots_hold
from simulator.arrays import Bools, Floats
from simulator.inputs.plan_check import split_in_proportion
from simulator.spec.plan import Plan

ROUGH_HALVINGS = 20
"""Bisection steps of a rough time."""


@dataclass(frozen=True, slots=True)
class PipelineMix:
    """Templates with the number of pipelines of each; of one micro batch size, unless each pipeline
    may have one of its own (``own_sizes``)."""

    templates: tuple[Template, ...]
    counts: tuple[int, ...]
    together: int | None = None
    """As in the plan: how many equal pipelines take machines together."""

    @property
    def has_one_size(self) -> bool:
        """Whether all pipelines have the same micro batch size."""
        return len({template.micro_batch for template in self.templates}) == 1

    @property
    def pipelines(self) -> int:
        """Number of pipelines."""
        return sum(self.counts)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return sum(n * sum(stage.tp for stage in t.stages) for t, n in self.pairs)

    @property
    def pairs(self) -> Iterator[tuple[Template, int]]:
        """Each template with its number of pipelines."""
        return zip(self.templates, self.counts, strict=True)

    @property
    def paced(self) -> Iterator[tuple[Template, int]]:
        """``pairs``, with the rough times of the mix's placement."""
        if self.together != 1:
            return self.pairs
        return ((replace(t, level_s=t.beside[0], fill_s=t.beside[1]), n) for t, n in self.pairs)

    def groups(self) -> dict[int, dict[int, int]]:
        """Device groups taken, by lot and TP degree."""
        found: dict[int, dict[int, int]] = {}
        for template, count in self.pairs:
            take(found, template, count)
        return found

    def with_count(self, index: int, count: int) -> PipelineMix:
        """The mix with another number of pipelines of one template, without it for 0."""
        keep = index + (count > 0)
        return PipelineMix(
            self.templates[:keep] + self.templates[index + 1 :],
            self.counts[:index] + (count,) * (count > 0) + self.counts[index + 1 :],
            self.together,
        )


def take(taken: dict[int, dict[int, int]], template: Template, count: int) -> None:
    """Add the groups of some pipelines to those taken, by lot and TP degree."""
    for (lot, tp), groups in template.gpus.items():
        of_lot = taken.setdefault(lot, {})
        of_lot[tp] = of_lot.get(tp, 0) + groups * count


def mix_of_shape(shape: PlanShape, maker: TemplateMaker) -> PipelineMix:
    """A plan with common boundaries as a mix of templates."""
    columns = [
        [(lot, tp) for lot, tp, count in column for _ in range(count)] for column in shape.columns
    ]
    rows = Counter(zip(*columns, strict=True))
    templates = tuple(
        maker.timed(
            tuple(TemplateStage(lot, tp, maker.costs.job.recompute) for lot, tp in row),
            shape.micro_batch,
            shape.cuts,
        )
        for row in rows
    )
    return PipelineMix(templates, tuple(rows.values()))


def mix_of_plan(plan: Plan, maker: TemplateMaker) -> PipelineMix | None:
    """A plan of one micro batch size as a mix of templates.

    ``None`` if it has several, or a stage is split over several places or at none of the lots.
    """
    lot_of = {lot.place: index for index, lot in enumerate(maker.lots)}
    if len(plan.sizes) > 1 or any(
        len(stage.places) > 1 or stage.place not in lot_of
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    ):
        return None
    rows = Counter(pipeline.stages for pipeline in plan.pipelines)
    templates = tuple(
        maker.timed(
            tuple(maker.stage_of(stage, lot_of[stage.place]) for stage in stages),
            plan.sizes[0],
            (0, *(stage.layers[1] for stage in stages)),
        )
        for stages in rows
    )
    return PipelineMix(templates, tuple(rows.values()), plan.together)


def placements(mix: PipelineMix, lots: Sequence[Lot]) -> Iterator[PipelineMix]:
    """The mix with each other placement that may make a difference, pipeline by pipeline first.

    Blocks of pipelines are tried whose replicas of a stage share a machine evenly.
    """
    slots: set[int] = set()
    spans: list[tuple[int, int]] = []
    for lot, groups in mix.groups().items():
        size = lots[lot].gpus_per_machine
        if sum(tp * count for tp, count in groups.items()) <= size:
            continue
        for template in mix.templates:
            own = [(tp, n) for (at, tp), n in template.gpus.items() if at == lot]
            if sum(n for _, n in own) > 1:
                slots.update(size // tp for tp, _ in own)
                spans.append((size, sum(tp * n for tp, n in own)))
    most = max(mix.counts) - (len(mix.counts) == 1)
    for together in sorted({n for room in slots for n in range(1, room) if room % n == 0}):
        if together > most:
            break
        # Blocks that fill machines evenly have the same machines as single pipelines.
        is_same = all(size % (together * gpus) == 0 for size, gpus in spans)
        if together != mix.together and (together == 1 or not is_same):
            yield replace(mix, together=together)
    if mix.together is not None:
        yield replace(mix, together=None)


def room_for(
    template: Template,
    lots: Sequence[Lot],
    taken: Mapping[int, Mapping[int, int]],
    grants: Sequence[LotQuota] = (),
) -> int:
    """How many pipelines of a template fit beside the groups already taken, within the quotas."""

    def fits(count: int) -> bool:
        wanted = {lot: dict(groups) for lot, groups in taken.items()}
        take(wanted, template, count)
        return lots_hold(lots, wanted)

    most = min(
        (lots[lot].gpus - sum(tp_ * n for tp_, n in taken.get(lot, {}).items())) // (tp * groups)
        for (lot, tp), groups in template.gpus.items()
    )
    for grant in grants:
        each = sum(tp * n for (lot, tp), n in template.gpus.items() if lot in grant.lots)
        if each:
            used = sum(tp * n for lot in grant.lots for tp, n in taken.get(lot, {}).items())
            most = min(most, (grant.gpus_max - used) // each)
    while most > 0 and not fits(most):
        most -= 1
    return max(most, 0)


def seconds_of(mix: PipelineMix, total: int) -> float:
    """Least time in which the mix runs ``total`` micro batches, at least one in each pipeline."""
    if mix.pipelines > total:
        return math.inf
    paced = list(mix.paced)
    low = max(t.fill_s for t, n in paced if n)
    if capacity(mix, low) >= total:
        return low
    high = low + total * max(t.level_s for t, _ in paced)
    rate = sum(n / t.level_s for t, n in paced)
    low = max(low, (total - mix.pipelines) / rate)
    for _ in range(40):
        middle = (low + high) / 2
        if capacity(mix, middle) >= total:
            high = middle
        else:
            low = middle
    return high


def rough_seconds(mixes: Sequence[PipelineMix], totals: Sequence[int]) -> Floats:
    """``seconds_of`` many mixes at once, accurate to a few parts in 10,000."""
    width = max(len(mix.templates) for mix in mixes)

    def table(of: Callable[[PipelineMix], Iterable[float]], rest: float) -> Floats:
        rows = [list(of(mix)) for mix in mixes]
        return np.array([row + [rest] * (width - len(row)) for row in rows], dtype=float)

    count = table(lambda mix: mix.counts, 0.0)
    level = table(lambda mix: (t.level_s for t, _ in mix.paced), 1.0)
    fill = table(lambda mix: (t.fill_s for t, _ in mix.paced), 0.0)
    total = np.array(totals, dtype=float)
    low = fill.max(axis=1)
    high = low + total * level.max(axis=1)

    def is_enough(seconds: Floats) -> Bools:
        done = 1 + np.floor((seconds[:, None] - fill) / level * (1 + 1e-12))
        enough: Bools = (count * done).sum(axis=1) >= total
        return enough

    at_once = is_enough(low)
    first = low
    for _ in range(ROUGH_HALVINGS):
        middle = (low + high) / 2
        enough = is_enough(middle)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    seconds = np.where(at_once, first, high)
    return np.where(count.sum(axis=1) > total, np.inf, seconds)


def capacity(mix: PipelineMix, seconds: float) -> int:
    """Micro batches that the mix runs within a time."""
    return sum(n * t.micro_batches_within(seconds) for t, n in mix.paced)


def micro_batches_of(mix: PipelineMix, total: int) -> tuple[int, ...]:
    """Micro batches of each pipeline, template by template, summing to ``total``."""
    seconds = seconds_of(mix, total)
    runs = [template for template, n in mix.paced for _ in range(n)]
    counts = [max(1, template.micro_batches_within(seconds)) for template in runs]
    # Too many: take them from the pipelines that would finish last.
    for _ in range(sum(counts) - total):
        index = max(
            (i for i in range(len(counts)) if counts[i] > 1),
            key=lambda i: (runs[i].fill_s + (counts[i] - 1) * runs[i].level_s, -i),
        )
        counts[index] -= 1
    return tuple(split_in_proportion(total, counts) if sum(counts) < total else counts)


def plan_of(mix: PipelineMix, total: int, maker: TemplateMaker) -> Plan:
    """The plan of a mix that runs ``total`` micro batches."""
    counts = iter(micro_batches_of(mix, total))
    # Share one object between equal pipelines: the estimator computes it once.
    made = cache(partial(maker.pipeline, pipelines=mix.pipelines))
    pipelines = tuple(made(template, next(counts)) for template, n in mix.pairs for _ in range(n))
    return maker.fitted(Plan(mix.templates[0].micro_batch, pipelines, together=mix.together))
