"""Plans with several chunks of layers on each device group: interleaved variants of judged plans.

Chunks divide the bubble of a pipeline, and multiply its messages. So only pipelines with few micro
batches gain from them. The device groups and their layers stay as they are, and each group's
layers are divided into chunks that take turns with those of the other groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from planner.search.local_search import EventSearch, JudgedPlan
from simulator.inputs.plan_check import split_in_proportion
from simulator.spec.plan import Pipeline, Plan, Stage, equal_cuts

CHUNKS = (2, 3, 4)
"""Numbers of chunks that are tried."""
FAMILIES_MAX = 20
"""Families of plans; variants with chunks of the best plan of each are judged, best first."""
BUBBLE_MIN = 0.02
"""Plans whose pipelines wait for a smaller share of the iteration are not tried."""


def best_in_chunks(search: EventSearch) -> JudgedPlan | None:
    """Judge variants with chunks of good plans, and return the best that keeps all limits.

    They are judged on top of the budget. Where no plan keeps the limits, those that break them
    least are divided into chunks.
    """
    starts = waiting_families(
        search,
        lambda plan: plan.schedule == "1f1b" and in_rounds(plan.pipelines) is not None,
    )
    found = [search.judge_plan(plan, one.mix) for one in starts for plan in in_chunks(one.plan)]
    keeping = [one for one in found if one is not None and one.keeps_limits]
    return min(keeping, key=lambda one: one.score, default=None)


def waiting_families(search: EventSearch, suits: Callable[[Plan], bool]) -> list[JudgedPlan]:
    """The best suitable plan of each family whose pipelines wait; the best families first.

    The best plans are often variants of one; under another schedule another family may be best.
    """
    return best_families(search, lambda plan: _bubble(plan) >= BUBBLE_MIN and suits(plan))


def best_families(search: EventSearch, suits: Callable[[Plan], bool]) -> list[JudgedPlan]:
    """The best suitable plan of each family of one micro batch size; the best families first."""
    kept = [one for one in search.judged if one.keeps_limits] or search.broken
    families: dict[Hashable, JudgedPlan] = {}
    for one in sorted(kept, key=lambda one: one.score):
        if len(one.plan.sizes) == 1 and not one.plan.offloads and suits(one.plan):
            families.setdefault(_family(one.plan), one)
    return [*families.values()][:FAMILIES_MAX]


def in_chunks(plan: Plan) -> Iterator[Plan]:
    """All variants of a plan without split stages in which its device groups hold chunks."""
    rounds = in_rounds(plan.pipelines)
    if rounds is None:
        return
    layers = plan.pipelines[0].stages[-1].layers[1]
    for chunks in CHUNKS:
        divided = {
            stages: _divide(stages, chunks, layers)
            for stages in dict.fromkeys(pipeline.stages for pipeline in rounds)
        }
        ways = min(map(len, divided.values()))
        for way in range(ways):
            pipelines = tuple(replace(p, stages=divided[p.stages][way]) for p in rounds)
            yield replace(plan, pipelines=pipelines, schedule="interleaved", virtual_stages=chunks)


def _family(plan: Plan) -> Hashable:
    """What plans of one family have in common."""
    shapes = {tuple((stage.places, stage.tp) for stage in each.stages) for each in plan.pipelines}
    return plan.micro_batch_size, len(plan.pipelines), frozenset(shapes)


def _bubble(plan: Plan) -> float:
    """The least share of its time that a pipeline's device group waits, without messages."""
    waits = ((len(each.stages) - 1, each.micro_batches) for each in plan.pipelines)
    return min(groups / (groups + count) for groups, count in waits)


def in_rounds(pipelines: Sequence[Pipeline], chunks: int = 1) -> tuple[Pipeline, ...] | None:
    """The pipelines with a multiple of their device groups as micro batches; none if impossible.

    ``chunks``: how many of their stages each device group has.
    """
    depths = {len(each.stages) // chunks for each in pipelines}
    if min(depths) < 2:
        return None
    if all(each.micro_batches % (len(each.stages) // chunks) == 0 for each in pipelines):
        return tuple(pipelines)
    (depth,) = depths if len(depths) == 1 else (0,)
    counts = [each.micro_batches for each in pipelines]
    if not depth or sum(counts) % depth or sum(counts) // depth < len(counts):
        return None
    shares = split_in_proportion(sum(counts) // depth, counts)
    return tuple(
        replace(each, micro_batches=depth * share)
        for each, share in zip(pipelines, shares, strict=True)
    )


def _divide(stages: tuple[Stage, ...], chunks: int, layers: int) -> list[tuple[Stage, ...]]:
    """The stages divided into chunks: each with its layers, or all chunks equal; at most 3 ways."""
    sizes = [stage.layers[1] - stage.layers[0] for stage in stages]
    cuts = []
    if min(sizes) >= chunks:
        for is_late in (False, True):
            shares = [_shares(size, chunks, is_late=is_late) for size in sizes]
            turns = zip(*shares, strict=True)
            cuts.append(tuple(accumulate(itertools.chain.from_iterable(turns), initial=0)))
    if layers >= chunks * len(stages):
        cuts.append(equal_cuts(layers, chunks * len(stages)))
    return [_interleave(stages, list(pairwise(cut))) for cut in dict.fromkeys(cuts)]


def _interleave(stages: tuple[Stage, ...], spans: Sequence[tuple[int, int]]) -> tuple[Stage, ...]:
    """Chunks of the stages' device groups, which take turns.

    A group recomputes as many layers as before, of its first chunks: these wait longest.
    """
    left = [stage.recomputed for stage in stages]
    found = []
    for number, span in enumerate(spans):
        stage, group, size = stages[number % len(stages)], number % len(stages), span[1] - span[0]
        some = min(left[group], size)
        left[group] -= some
        if isinstance(stage.recompute, int):
            stage = replace(stage, recompute="full" if some == size else some or "none")
        found.append(replace(stage, layers=span))
    return tuple(found)


def _shares(size: int, chunks: int, *, is_late: bool) -> list[int]:
    """Divide a stage's layers; those that remain go one each to the last or the first chunks."""
    each, rest = divmod(size, chunks)
    shares = [each + (number < rest) for number in range(chunks)]
    return shares[::-1] if is_late else shares
