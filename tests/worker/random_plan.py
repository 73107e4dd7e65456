"""Random plans, uneven in stages, TP degrees, micro batches and chunks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

from simulator.models.layers import Recompute
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Schedule, Stage, with_sizes

HERE = Place("cpu", "this", "here")
OWN_SIZES = 0.4
"""Share of plans whose pipelines have micro batch sizes of their own."""


def any_plan(
    draw: Random, job: Job, *, pipelines_max: int = 6, stages_max: int = 4, ranks_max: int = 10
) -> Plan:
    """Return a plan for the job's batch on at most ``ranks_max`` ranks."""
    batch = job.global_batch
    size = draw.choice([n for n in range(1, batch + 1) if batch % n == 0])
    micro_batches = batch // size
    count = draw.randint(1, min(pipelines_max, micro_batches, ranks_max))
    left = ranks_max - count
    pipelines = []
    for number, share in enumerate(_shares(draw, micro_batches, count)):
        stages, used = _stages(draw, job, stages_max=stages_max, ranks_max=1 + left)
        left -= used - 1
        assert left >= 0, f"pipeline {number} took more ranks than there are"
        pipelines.append(Pipeline(share, stages))
    schedule: Schedule = draw.choice(["1f1b", "1f1b", "gpipe"])
    plan = Plan(size, tuple(pipelines), schedule)
    return in_own_sizes(draw, plan) if draw.random() < OWN_SIZES else plan


def in_own_sizes(draw: Random, plan: Plan) -> Plan:
    """Cut the samples of each pipeline into micro batches of another size."""
    pipelines, sizes = [], []
    for pipeline in plan.pipelines:
        rounds = plan.group_count(pipeline) if plan.schedule == "interleaved" else 1
        samples = plan.samples_of(pipeline)
        size = draw.choice([n for n in range(1, samples + 1) if samples % (n * rounds) == 0])
        pipelines.append(replace(pipeline, micro_batches=samples // size))
        sizes.append(size)
    return with_sizes(replace(plan, pipelines=tuple(pipelines)), sizes)


def any_interleaved_plan(draw: Random, job: Job, *, ranks_max: int = 10) -> Plan | None:
    """Return a plan whose device groups have several chunks each, or none if none fits."""
    layers, batch = len(job.model.layers), job.global_batch
    size = draw.choice([n for n in range(1, batch + 1) if batch % n == 0])
    chunks = draw.randint(2, layers // 2)
    pipelines: list[Pipeline] = []
    left, ranks = batch // size, ranks_max
    while left > 0:
        most = min(layers // chunks, ranks, left)
        fitting = [n for n in range(2, most + 1) if left % n != 1]
        if not fitting:
            return None
        groups = draw.choice(fitting)
        rounds = draw.randint(1, left // groups)
        # What is left must fill the rounds of another pipeline.
        if left - rounds * groups == 1:
            rounds -= 1
        owned = [draw.choice([tp for tp in (1, 2) if job.max_tp % tp == 0]) for _ in range(groups)]
        owned = owned if sum(owned) <= ranks else [1] * groups
        ends = itertools.accumulate(_shares(draw, layers, groups * chunks), initial=0)
        stages = tuple(
            Stage(span, owned[n % groups], (HERE,), _recompute(draw, span[1] - span[0]))
            for n, span in enumerate(itertools.pairwise(ends))
        )
        pipelines.append(Pipeline(rounds * groups, stages))
        left, ranks = left - rounds * groups, ranks - sum(owned)
    plan = Plan(size, tuple(pipelines), "interleaved", chunks)
    return in_own_sizes(draw, plan) if draw.random() < OWN_SIZES else plan


def _recompute(draw: Random, layers: int) -> Recompute | int:
    return draw.choice(["none", "full", *range(1, layers)])


def _shares(draw: Random, total: int, parts: int) -> list[int]:
    cuts = [0, *sorted(draw.sample(range(1, total), parts - 1)), total]
    return [end - begin for begin, end in itertools.pairwise(cuts)]


def _stages(
    draw: Random, job: Job, *, stages_max: int, ranks_max: int
) -> tuple[tuple[Stage, ...], int]:
    layers = len(job.model.layers)
    count = draw.randint(1, min(stages_max, layers, ranks_max))
    degrees = [tp for tp in (1, 2, 4) if job.max_tp % tp == 0]
    stages, first, used = [], 0, 0
    for number, length in enumerate(_shares(draw, layers, count)):
        most = ranks_max - used - (count - number - 1)
        tp = draw.choice([tp for tp in degrees if tp <= most])
        stages.append(Stage((first, first + length), tp, (HERE,), _recompute(draw, length)))
        first, used = first + length, used + tp
    return tuple(stages), used
