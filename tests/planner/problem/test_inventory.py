"""Which groups fit into machines, compared with trying all placements."""

from __future__ import annotations

import random
from collections import Counter

from planner.api import plan_job
from planner.problem.inventory import Lot
from planner.problem.job_options import tp_degrees
from planner.problem.question import Question
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan
from simulator.models.families import build_model
from simulator.spec.job import Job


def lot_of(machines: tuple[tuple[int, int], ...]) -> Lot:
    gpus = sum(size * times for size, times in machines)
    return Lot("T4", "T4x8", "local", gpus, max(size for size, _ in machines), machines, None)


def is_placeable(free: tuple[int, ...], groups: tuple[int, ...]) -> bool:
    """Whether each group finds a machine, whichever way they are placed."""
    if not groups:
        return True
    tp, rest = groups[0], groups[1:]
    return any(
        is_placeable((*free[:n], size - tp, *free[n + 1 :]), rest)
        for n, size in enumerate(free)
        if size >= tp and size not in free[:n]
    )


def test_groups_that_fit_can_be_placed(examples: int) -> None:
    seen = Counter[bool]()
    for seed in range(4 * examples):
        rng = random.Random(f"supply {seed}")
        sizes = rng.sample([2, 3, 4, 6, 8], 2)
        machines = tuple((size, rng.randint(1, 2)) for size in sorted(sizes))
        free = tuple(size for size, times in machines for _ in range(times))
        powers = rng.random() < 0.4
        degrees = [1, 2, 4] if powers else [1, 2, 3, 4, 5, 6]
        groups = Counter(rng.choice(degrees) for _ in range(rng.randint(1, 6)))
        largest_first = tuple(sorted(groups.elements(), reverse=True))
        fits = lot_of(machines).holds(groups)
        seen[fits] += 1
        if fits or powers:
            # Sizes that do not divide each other may be refused though they would fit.
            assert fits == is_placeable(free, largest_first), (seed, machines, groups)
    assert min(seen.values()) > examples / 4


def test_tp_degrees_include_non_powers_of_two() -> None:
    model = build_model("gpt2", layers=2, hidden=3072, heads=12, vocab=512, sequence=512)
    job = Job("threes", model, 2, 512, max_tp=6, precision="fp32")
    assert tp_degrees(job) == (1, 2, 3, 6), "4 does not divide the largest"
    pool = Pool("us-central1-a", "A100-40", "A100-40x3", 3, 3)
    cluster = Cluster((pool,), load_catalogue())
    answer = plan_job(Question(job, cluster, Measurements()))
    assert answer.plan is not None
    assert not check_plan(answer.plan, job, cluster)
    assert {stage.tp for line in answer.plan.pipelines for stage in line.stages} == {3}
