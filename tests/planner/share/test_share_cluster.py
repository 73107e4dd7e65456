"""A cluster is split as well as the searched plans allow, and searches go where they help."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.problem.question import Answer, Question
from planner.share.share_cluster import SharedCluster, share_cluster
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.estimate.result import Estimate, Money
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from simulator.spec.provenance import MEASURED

CATALOGUE = load_catalogue()
Machines = tuple[int, ...]
Worth = Callable[[Machines], float]
"""Samples per second of a job on machines of each pool; 0: it has no plan there."""


def question(name: str, machines: Machines) -> Question:
    pools = tuple(
        Pool(f"us-central1-{zone}", "A100-40", "A100-40x4", 4, 4 * count)
        for zone, count in zip("abc", machines, strict=False)
    )
    job = Job(name, preset("opt-125m"), 64, 512)
    return Question(job, Cluster(pools, CATALOGUE), Measurements())


def answered(asked: Question, worth: Worth) -> Answer:
    """The best plan on some or all of the machines: a pipeline on each."""
    up = tuple(pool.gpus // 4 for pool in asked.cluster.pools)
    parts = [part for part in product(*(range(n + 1) for n in up)) if any(part) and worth(part)]
    if not parts:
        return Answer(None, None, 1, 0.0, 0.0, "throughput")
    best = max(parts, key=lambda part: (worth(part), -sum(part), part))
    places = [
        Place(pool.gpu, pool.machine, pool.zone)
        for pool, count in zip(asked.cluster.pools, best, strict=True)
        for _ in range(count)
    ]
    pipelines = tuple(Pipeline(4, (Stage((0, 14), 4, (place,)),)) for place in places)
    seconds = 64 / worth(best)
    estimate = Estimate("event", seconds, 64, (), Money(0.0, 0.0), (), "", MEASURED)
    return Answer(Plan(1, pipelines), estimate, 1, 0.0, 0.0, "throughput")


def shared(
    worths: list[Worth],
    machines: Machines,
    *,
    weights: list[float] | None = None,
    searches: int = 1000,
) -> SharedCluster:
    names = [f"job-{number}" for number in range(len(worths))]
    by_name = dict(zip(names, worths, strict=True))
    return share_cluster(
        [question(name, machines) for name in names],
        weights or [1.0] * len(worths),
        lambda asked: answered(asked, by_name[asked.job.name]),
        searches=searches,
    )


def test_plan_that_was_found_before_is_used_on_machines_that_are_left() -> None:
    """Its two machines may be on demand, spot, or one of each."""
    place = Place("A100-40", "A100-40x4", "us-central1-a")
    pipelines = tuple(Pipeline(32, (Stage((0, 14), 4, (place,)),)) for _ in range(2))
    estimate = Estimate("event", 1.0, 64, (), Money(0.0, 0.0), (), "", MEASURED)
    answer = Answer(Plan(1, pipelines), estimate, 1, 0.0, 0.0, "throughput")
    for on_demand, spot in ((3, 5), (5, 5), (3, 7)):
        pools = tuple(
            Pool("us-central1-a", "A100-40", "A100-40x4", 4, 4 * count, spot=is_spot)
            for count, is_spot in ((on_demand, False), (spot, True))
        )
        count = (on_demand + spot) // 2
        questions = [
            replace(question(f"job-{n}", ()), cluster=Cluster(pools, CATALOGUE))
            for n in range(count)
        ]
        found = share_cluster(questions, [1.0] * count, lambda _: answer, searches=1000)
        assert machines_of(found) == count * [2], (on_demand, spot)


def scaling(power: float = 0.8, needs: int = 1) -> Worth:
    return lambda machines: sum(machines) ** power if sum(machines) >= needs else 0.0


def machines_of(found: SharedCluster) -> list[int]:
    return [sum(part.machines) for part in found.parts]


def test_no_machine_stays_idle_that_a_job_can_use() -> None:
    """The other job uses three at most, and no guessed part has seven of ten."""
    found = shared([lambda up: min(sum(up), 3) ** 0.8, scaling()], (10,), searches=16)
    assert machines_of(found) == [3, 7]
    assert found.idle == (0,)
    assert found.together == pytest.approx(1 + 0.7**0.8)


def test_the_own_part_with_all_idle_machines_is_searched_first() -> None:
    """Four searches: the whole, a half, then all that the other job leaves of its half."""
    found = shared([lambda up: min(sum(up), 3) ** 0.8, scaling()], (10,), searches=4)
    assert machines_of(found) == [3, 7]


def test_a_machine_goes_to_the_job_that_it_helps_more() -> None:
    """No guessed part has five or seven of twelve."""
    assert machines_of(shared([scaling(0.8), scaling(0.5)], (12,))) == [7, 5]


def test_weights_count_and_a_job_that_needs_more_gets_it() -> None:
    assert machines_of(shared([scaling(), scaling()], (12,), weights=[2, 1])) == [8, 4]
    assert machines_of(shared([scaling(needs=9), scaling()], (12,))) == [9, 3]


def test_a_job_without_room_waits_and_one_without_any_plan_says_so() -> None:
    small, large, never = shared([scaling(), scaling(needs=8), scaling(needs=9)], (8,)).parts
    assert (large.known, large.alone is None, large.of_alone) == (None, False, 0.0)
    assert sum(small.machines) == 8
    assert (never.known, never.alone) == (None, None)


def test_no_job_is_searched_more_often_than_asked_for() -> None:
    for searches in (1, 2, 5):
        found = shared([scaling(), scaling(0.5)], (7, 5), searches=searches)
        assert all(part.plans.searched <= searches for part in found.parts)


@given(
    st.integers(2, 12),
    st.lists(
        st.tuples(st.floats(0.2, 1.0), st.integers(1, 4), st.sampled_from([1.0, 2.5])),
        min_size=2,
        max_size=3,
    ),
)
def test_no_other_split_of_one_pool_is_better(
    count: int, jobs: list[tuple[float, int, float]]
) -> None:
    """Against all splits, of jobs of which each machine adds less than the one before."""
    worths = [scaling(power, needs) for power, needs, _ in jobs]
    weights = [weight for *_, weight in jobs]
    found = shared(worths, (count,), weights=weights)
    best = max(
        rank(worths, weights, [(n,) for n in split], (count,))
        for split in product(range(count + 1), repeat=len(jobs))
        if sum(split) <= count
    )
    own = rank(worths, weights, [part.machines for part in found.parts], (count,))
    assert own[0] == best[0]
    assert math.isclose(own[1], best[1], abs_tol=1e-6)


@st.composite
def lumps(draw: st.DrawFn) -> tuple[Machines, list[Worth], list[float]]:
    """Jobs whose speed on each set of machines is drawn: plans come in lumps."""
    machines = draw(st.sampled_from([(4,), (3, 2), (2, 2, 1)]))
    worths: list[Worth] = []
    for _ in range(draw(st.integers(2, 3))):
        parts = [part for part in product(*(range(n + 1) for n in machines)) if any(part)]
        speeds = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0])
        worths.append({part: draw(speeds) for part in parts}.__getitem__)
    return machines, worths, [draw(st.sampled_from([1.0, 3.0])) for _ in worths]


@given(lumps())
def test_no_machine_helps_another_job_more(
    case: tuple[Machines, list[Worth], list[float]],
) -> None:
    """Neither an idle machine nor one of another job makes the split better."""
    machines, worths, weights = case
    found = shared(worths, machines, weights=weights)
    parts = [part.machines for part in found.parts]
    own = rank(worths, weights, parts, machines)
    for giver, receiver in product([None, *range(len(parts))], range(len(parts))):
        for pool in range(len(machines)):
            other = [*parts]
            if giver is not None and other[giver][pool]:
                other[giver] = moved(other[giver], pool, -1)
            elif giver is not None or not found.idle[pool]:
                continue
            other[receiver] = moved(other[receiver], pool, 1)
            better = rank(worths, weights, other, machines)
            assert (better[0], round(better[1], 6)) <= (own[0], round(own[1], 6))


def moved(machines: Machines, pool: int, by: int) -> Machines:
    return (*machines[:pool], machines[pool] + by, *machines[pool + 1 :])


def rank(
    worths: list[Worth], weights: list[float], parts: list[Machines], machines: Machines
) -> tuple[float, float]:
    """What a split is worth, if each job has the best plan on its part."""
    running = value = 0.0
    for worth, weight, part in zip(worths, weights, parts, strict=True):
        own, alone = best_worth(worth, part), best_worth(worth, machines)
        if own:
            running += weight
            value += weight * math.log(own / alone)
    return running, value


def best_worth(worth: Worth, up: Machines) -> float:
    parts = (part for part in product(*(range(n + 1) for n in up)) if any(part))
    return max(map(worth, parts), default=0.0)


def test_the_goal_cost_counts_samples_per_dollar() -> None:
    """On this cluster GPUs cost nothing, so that it is samples per second again."""
    asked = question("job-0", (4,))
    objective = replace(asked.job.objective, goal="cost")
    cheap = replace(asked, job=replace(asked.job, objective=objective))
    found = share_cluster(
        [cheap, asked], [1.0, 1.0], lambda each: answered(each, scaling()), searches=9
    )
    assert machines_of(found) == [2, 2]
