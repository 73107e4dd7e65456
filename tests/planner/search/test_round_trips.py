"""The least prices of pipelines by their round trips, against random plans in random worlds."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from planner.pipelines.pipeline_template import TemplateMaker
from planner.problem.inventory import lots_of
from planner.search import sync_floor
from planner.search.bound import share_out
from planner.search.round_trips import RoundTrips, levels_of
from planner.search.stage_limits import StageFloors
from simulator.estimate import event_estimator, sync_rings
from simulator.network import network
from tests.planner.search.test_bound import just_enough, placed_somehow
from tests.simulator.worlds import random_plan, random_world


@pytest.mark.sim
@pytest.mark.parametrize("is_gloo", [False, True])
def test_no_pipeline_is_cheaper_than_its_bound(
    examples: int, is_gloo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_gloo:
        for module in (event_estimator, network, sync_floor, sync_rings):
            monkeypatch.setattr(module, "uses_gloo", lambda _: True)
    tight = 0
    for seed in range(examples):
        rng = random.Random(f"round trips {seed}")
        world = random_world(rng)
        plan = placed_somehow(random_plan(rng, world, schedules=("1f1b",), splits=False), rng)
        judge = world.estimator
        estimate = judge.estimate(plan)
        if not estimate.fits:
            continue
        lots = lots_of(just_enough(plan, world), judge.sites)
        floors = StageFloors(
            TemplateMaker(judge.costs, judge.network, judge.sites, lots),
            lots,
            degrees=(1, 2, 4),
            recomputes=("none", "full"),
            per_layer_sync=judge.overlaps,
        )
        price = {gpu: rng.uniform(0.3, 3) for gpu in sorted({lot.gpu for lot in lots})}
        prices = np.array([price[choice.gpu] * choice.tp for choice in floors.choices])
        number = len(plan.pipelines)
        fewest = rng.randint(max(1, number - 1), number)
        trips = RoundTrips.of(floors, plan.micro_batch_size, fewest, number + rng.randint(0, 1))
        counts = np.array(sorted({pipeline.micro_batches for pipeline in plan.pipelines}))
        dearest = 4 * len(plan.pipelines[0].stages) * max(price.values()) * 4
        found, _ = trips.prices(
            estimate.iteration_s, counts, prices, highest=dearest, stages_max=99
        )
        for pipeline in plan.pipelines:
            paid = sum(price[stage.place.gpu] * stage.tp for stage in pipeline.stages)
            least = found[np.searchsorted(counts, pipeline.micro_batches)]
            assert least <= paid * (1 + 1e-9), seed
            tight += least >= paid * (1 - 1e-9)
    assert tight, "some pipelines are the cheapest in their time"


def test_micro_batches_are_shared_out_at_the_least_price() -> None:
    rng = random.Random("shares")
    for _ in range(20):
        total, pipelines = rng.randint(4, 9), rng.randint(1, 4)
        counts = np.array([1, 2, 4, 7])
        price = np.sort([rng.uniform(1, 9) for _ in counts])

        def of(n: int, counts: np.ndarray = counts, price: np.ndarray = price) -> float:
            return float(price[np.searchsorted(counts, n, side="right") - 1])

        ways = itertools.product(range(1, total + 1), repeat=pipelines)
        best = min(sum(map(of, way)) for way in ways if sum(way) == total)
        least, shares = share_out(counts, price, pipelines, total)
        assert least == pytest.approx(best)
        assert set(shares) <= set(range(len(counts)))


def test_levels_are_the_sums_of_prices() -> None:
    assert levels_of(np.array([1.0, 1.5]), 3.1).tolist() == [0, 1, 1.5, 2, 2.5, 3]
    assert len(levels_of(np.array([0.01, 0.013, 7.0]), 9.0)) <= 96
