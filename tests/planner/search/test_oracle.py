"""The planner under the event estimator against all plans of small cases."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.problem.inventory import lots_of
from planner.problem.question import Answer, Question
from simulator.layer_costs.profile import LayerSizes, Timing
from simulator.models.layers import Recompute
from simulator.spec.plan import Pipeline, Plan, Stage
from tests.planner.search.tight_plans import least_of, tables_of
from tests.planner.small_cases import SmallCase, random_case

CASES = 80
"""Cases of each goal that are compared with all their plans; `make sim` tries two thousand."""


def every_pipeline(case: SmallCase) -> list[tuple[Stage, ...]]:
    layers = len(case.job.model.layers)
    gpus = sum(pool.gpus for pool in case.cluster.pools)
    options = [
        (place, tp)
        for place, pool in {pool.place: pool for pool in case.cluster.pools}.items()
        for tp in (1, 2, 4)
        if tp <= min(pool.gpus, case.job.max_tp)
    ]
    found = []
    for stages in range(1, min(layers, gpus) + 1):
        for cells in itertools.product(options, repeat=stages):
            if sum(tp for _, tp in cells) > gpus:
                continue
            for inner in itertools.combinations(range(1, layers), stages - 1):
                spans = list(itertools.pairwise((0, *inner, layers)))
                ways = [every_recomputation(case, span) for span in spans]
                for chosen in itertools.product(*ways):
                    found.append(
                        tuple(
                            Stage(span, tp, (place,), way)
                            for span, (place, tp), way in zip(spans, cells, chosen, strict=True)
                        )
                    )
    return found


def every_recomputation(case: SmallCase, layers: tuple[int, int]) -> list[Recompute | int]:
    """What a stage may recompute."""
    if case.job.recompute == "auto":
        return ["none", *range(1, layers[1] - layers[0]), "full"]
    return [case.job.recompute]


def every_plan(case: SmallCase) -> Iterator[Plan]:
    """All plans of a case, in every placement."""
    for plan in every_unplaced_plan(case):
        for together in (None, *range(1, len(plan.pipelines) + 1)):
            yield replace(plan, together=together)


def every_unplaced_plan(case: SmallCase) -> Iterator[Plan]:
    pipelines = every_pipeline(case)
    gpus = sum(pool.gpus for pool in case.cluster.pools)
    for b in (1, 2, 4):
        total, rest = divmod(case.job.global_batch, b)
        if rest:
            continue
        for count in range(1, min(total, gpus) + 1):
            for chosen in itertools.combinations_with_replacement(pipelines, count):
                if sum(stage.tp for stages in chosen for stage in stages) > gpus:
                    continue
                for inner in itertools.combinations(range(1, total), count - 1):
                    ends = (0, *inner, total)
                    yield Plan(
                        b,
                        tuple(
                            Pipeline(ends[i + 1] - ends[i], stages)
                            for i, stages in enumerate(chosen)
                        ),
                    )


def assert_none_is_better(case: SmallCase, seed: int) -> Answer:
    """Compare the planner and its bound with all plans of a case; return its answer."""
    answer = plan_job(Question(case.job, case.cluster, case.measurements, "event"))
    judge = case.judge
    least = least_of(case, judge, every_plan(case))
    if least.score == math.inf:
        assert answer.plan is None, seed
        return answer
    assert answer.plan is not None, seed
    assert answer.objective == pytest.approx(least.score, rel=1e-9), seed
    tables = tables_of(judge, lots_of(case.cluster, judge.facts), case.job.recompute)
    least.is_above_bound(case, tables, seed)
    least.is_above(answer, seed)
    return answer


def oracle_case(goal: str, seed: int) -> SmallCase:
    """One to four GPUs of up to three kinds in up to two zones; few layers on four GPUs."""
    rng = random.Random(f"event {goal} {seed}")
    most = 1 + seed % 4
    layers = 3 if most == 4 else 4
    return random_case(rng, gpus_max=most, layers_max=layers, batch=rng.choice([2, 4]), goal=goal)


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_is_better_than_the_planners(goal: str, examples: int) -> None:
    for seed in range(max(CASES, 2 * examples)):
        assert_none_is_better(oracle_case(goal, seed), seed)


def case_where_placement_matters(rng: random.Random) -> SmallCase:
    """GPUs that hold about two thirds of the model each, on machines of two, and large messages."""
    case = random_case(rng, gpus_max=1, layers_max=3)
    layers = len(case.job.model.layers)
    kept = [int(11e9 / layers * rng.uniform(0.8, 1.2)) for _ in range(layers)]
    messages = tuple(int(10 ** rng.uniform(6, 8.5)) for _ in range(layers))
    parameters = (int(10 ** rng.uniform(5, 8)),) * layers
    profile = replace(
        case.profile,
        timings={
            key: Timing(one.forward_s / 20, one.backward_s / 20, 0.01)
            for key, one in case.profile.timings.items()
        },
        sizes={
            tp: LayerSizes(parameters, messages, tuple(n // tp for n in kept)) for tp in (1, 2, 4)
        },
    )
    pool = replace(
        case.cluster.pools[0], gpu="A100-40", machine="A100-40x2", gpus_per_machine=2, gpus=4
    )
    return replace(
        case,
        job=replace(case.job, max_tp=1),
        cluster=replace(case.cluster, pools=(pool,)),
        measurements=replace(case.measurements, known=profile),
    )


@pytest.mark.slow
@pytest.mark.sim
def test_no_placement_is_better_than_the_planners(examples: int) -> None:
    chosen = set()
    for seed in range(max(4, examples // 5)):
        case = case_where_placement_matters(random.Random(f"placement {seed}"))
        answer = assert_none_is_better(case, seed)
        chosen.add(answer.plan.together if answer.plan is not None else None)
    assert chosen == {None, 1}, "both placements are best somewhere"


def case_where_recomputation_matters(rng: random.Random, goal: str) -> SmallCase:
    """One or two GPUs that hold about the activations of one micro batch of the whole model."""
    case = random_case(rng, gpus_max=2, layers_max=6, kinds_max=1, batch=4, goal=goal)
    layers = len(case.job.model.layers)
    room = case.cluster.catalogue.gpu(case.cluster.pools[0].gpu).memory_bytes / 4
    kept = [int(room / layers * rng.uniform(0.3, 1.4)) for _ in range(layers)]
    sizes = {
        tp: LayerSizes((10**6,) * layers, (10**6,) * layers, tuple(n // tp for n in kept))
        for tp in (1, 2, 4)
    }
    return replace(
        case,
        job=replace(case.job, recompute="auto", max_tp=2),
        measurements=replace(case.measurements, known=replace(case.profile, sizes=sizes)),
    )


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_recomputes_better_than_the_planners(goal: str, examples: int) -> None:
    """The fewest layers that fit are at least as good as any other number."""
    shares = 0
    cases = max(20, examples // 5)
    for seed in range(cases):
        case = case_where_recomputation_matters(random.Random(f"recompute {seed}"), goal)
        answer = assert_none_is_better(case, seed)
        if answer.plan is not None:
            stages = (stage for pipeline in answer.plan.pipelines for stage in pipeline.stages)
            shares += any(isinstance(stage.recompute, int) for stage in stages)
    assert shares > cases / 5
