"""Plans whose pipelines have micro batch sizes of their own: variants of judged plans.

Large micro batches suit GPUs with much memory and wide kernels; small ones fit where memory is
tight, and fill a deep pipeline. So where pipelines run on different kinds of GPUs, each may have
the size that suits it. The samples are shared out anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from planner.pipelines.own_sizes import in_size, plan_with_own_sizes, rough_seconds_of
from planner.pipelines.pipeline_mix import PipelineMix, room_for
from planner.search.chunks import best_families
from planner.search.local_search import EventSearch, JudgedPlan

TIMES_MAX = 16
"""A pipeline's size differs from that of the plan that is varied by this factor at most."""
COMBINATIONS_MAX = 500
"""Most combinations of sizes of one plan; where there are more, one template is changed."""
JUDGED_EACH = 4
"""Variants of one plan that are judged, by their rough times."""
MORE_PER_LOT = 2
"""Templates of each lot and size that are added where GPUs are idle."""


def best_with_own_sizes(search: EventSearch) -> JudgedPlan | None:
    """Judge variants of good plans whose sizes differ; return the best that keeps all limits.

    They are judged on top of the budget. Where no plan keeps the limits, those that break them
    least are varied.
    """
    samples, found = search.job.global_batch, []
    for start in best_families(search, lambda plan: plan.schedule == "1f1b"):
        scored = [(_rough(search, mix), mix) for mix in _variants(search, start.mix)]
        ranked = sorted((pair for pair in scored if pair[0] < math.inf), key=lambda pair: pair[0])
        for _, mix in ranked[:JUDGED_EACH]:
            plan = plan_with_own_sizes(mix, samples, search.maker_for(mix))
            if plan is not None and len(plan.sizes) > 1:
                found.append(search.judge_plan(plan, mix))
    keeping = [one for one in found if one is not None and one.keeps_limits]
    return min(keeping, key=lambda one: one.score, default=None)


def _variants(search: EventSearch, mix: PipelineMix) -> Iterator[PipelineMix]:
    """The mix with other micro batch sizes, also of further pipelines on idle GPUs."""
    yield from _resize(search, mix)
    b, samples = mix.templates[0].micro_batch, search.job.global_batch
    for lot, size in itertools.product(range(len(search.lots)), _sizes(search, b)):
        if size == b:
            continue  # The search has tried these.
        for template in search.templates((lot,), size, samples // size)[:MORE_PER_LOT]:
            count = room_for(template, search.lots, mix.groups(), search.grants)
            if count > 0:
                more = (*mix.templates, template), (*mix.counts, count)
                yield PipelineMix(*more, mix.together)


def _resize(search: EventSearch, mix: PipelineMix) -> Iterator[PipelineMix]:
    """The mix with other micro batch sizes of its templates, not all the same."""
    b, samples, maker = mix.templates[0].micro_batch, search.job.global_batch, search.maker_for(mix)
    sizes, templates = _sizes(search, b), range(len(mix.templates))
    if len(sizes) ** len(templates) <= COMBINATIONS_MAX:
        ways = [way for way in itertools.product(sizes, repeat=len(templates)) if len(set(way)) > 1]
    else:
        ways = [
            tuple(size if k == index else b for k in templates)
            for index in templates
            for size in sizes
            if size != b
        ]
    for way in ways:
        changed: PipelineMix | None = mix
        for index, size in enumerate(way):
            if changed is not None and size != b:
                changed = in_size(changed, index, size, samples, maker)
        if changed is not None:
            yield changed


def _sizes(search: EventSearch, b: int) -> list[int]:
    """The micro batch sizes near one."""
    return [
        size for size in search.micro_batches if b <= size * TIMES_MAX and size <= b * TIMES_MAX
    ]


def _rough(search: EventSearch, mix: PipelineMix) -> float:
    """The rough objective of a mix."""
    return search.rough(mix, rough_seconds_of(mix, search.job.global_batch))
