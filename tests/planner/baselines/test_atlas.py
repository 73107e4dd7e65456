"""Atlas against golden placements, by hand, and on small real cases."""

from __future__ import annotations

import math

import pytest

from planner.baselines.atlas.planner import (
    AtlasInputs,
    AtlasLayout,
    AtlasPlanner,
    AtlasRegion,
    inputs_from,
    layouts,
    place_stages,
    search,
    to_plan,
)
from planner.baselines.shared.equal_nodes import equal_nodes
from simulator.estimate.event_estimator import EventEstimator
from simulator.spec.plan import Plan
from tests.planner.baselines.golden_inputs import load_golden
from tests.planner.baselines.small_case import checked_plans, gpus_of, pool, small_case

MODES = ("fixed", "published")


@pytest.mark.parametrize("mode", MODES)
def test_golden_placements(reference, mode):
    golden = load_golden(reference, "atlas")
    for case in golden["cases"]:
        regions = [AtlasRegion(name, (gpus,)) for name, gpus in case["gpus_per_region"].items()]
        placed = place_stages(regions, pp=case["pp"], dp=case["dp"], tp=case["tp"], mode=mode)
        wanted = case["stage_regions"]
        assert placed == (None if wanted is None else tuple(wanted))
    regions = [
        AtlasRegion(name, (gpus,)) for name, gpus in golden["cases"][0]["gpus_per_region"].items()
    ]
    counts = golden["number_of_placeable_(pp,dp)_with_pp_1..13_dp_1..32"]
    for tp, count in counts.items():
        inputs = AtlasInputs(tuple(regions), int(tp), 14, 33 if mode == "published" else 32, (1,))
        assert sum(1 for _ in layouts(inputs, mode, lambda *_: True)) == count


@pytest.mark.parametrize(("mode", "placed"), [("published", ("r",)), ("fixed", None)])
def test_published_mode_counts_gpus_that_fit_no_group(mode, placed):
    # Two zones of three GPUs hold two groups of two between them, not three.
    assert place_stages([AtlasRegion("r", (3, 3))], pp=1, dp=3, tp=2, mode=mode) == placed


@pytest.mark.parametrize(("mode", "largest"), [("published", 3), ("fixed", 4)])
def test_published_mode_never_tries_the_largest_number_of_replicas(mode, largest):
    inputs = AtlasInputs((AtlasRegion("r", (8,)),), 1, 2, 4, (1,))
    assert [found.dp for found in layouts(inputs, mode, lambda *_: True)] == [
        *range(1, largest + 1)
    ]


def test_equal_regions_keep_their_order_and_larger_ones_come_first():
    regions = [AtlasRegion("b", (2,)), AtlasRegion("a", (2,)), AtlasRegion("c", (1, 2))]
    placed = place_stages(regions, pp=6, dp=1, tp=1, mode="fixed")
    assert placed == ("c", "c", "c", "b", "b", "a")


def test_larger_micro_batches_are_not_tried_once_one_does_not_fit():
    inputs = AtlasInputs((AtlasRegion("r", (1,)),), 1, 2, 8, (1, 2, 4, 8))
    asked = []

    def shape_fits(pp: int, size: int) -> bool:
        asked.append((pp, size))
        return size != 2

    assert [found.micro_batch_size for found in layouts(inputs, "fixed", shape_fits)] == [1]
    assert asked == [(1, 1), (1, 2)]


def test_the_fastest_layout_comes_first():
    inputs = AtlasInputs((AtlasRegion("r", (4,)),), 1, 4, 4, (1,))
    found = search(inputs, "fixed", lambda *_: True, lambda layout: -layout.pp * layout.dp)
    assert [-seconds for seconds, _ in found] == [4, 4, 3, 3, 2, 2, 1]
    assert found[0][1] == AtlasLayout(1, 4, 1, 1, ("r",))
    assert found[1][1] == AtlasLayout(1, 2, 2, 1, ("r", "r"))


@pytest.mark.parametrize("mode", MODES)
def test_plans_of_a_real_case(mode):
    case = small_case(
        pool("A100-40", 8, per_machine=4, zone="us-central1-a"),
        pool("A100-40", 4, per_machine=4, zone="us-east1-b"),
        pool("V100-16", 4, per_machine=4, zone="us-east1-b"),
        global_batch=16,
    )
    found = AtlasPlanner().proposals(case, mode)
    plans = checked_plans(case, found)
    assert len(plans) == len(found)
    assert {name.split("@")[0] for name in gpus_of(plans)} == {"A100-40", "V100-16"}
    simulator = EventEstimator(case.costs, case.network, case.facts)
    for plan in plans:
        # All replicas of a stage share a region.
        for replicas in zip(*(p.stages for p in plan.pipelines), strict=True):
            assert len({stage.place.zone for stage in replicas}) == 1
    assert found[0].seconds == simulator.estimate(plans[0]).iteration_s


def test_the_zones_of_a_region_are_filled_one_after_the_other():
    zones = ("us-central1-a", "us-central1-b")
    case = small_case(*(pool("A100-40", 4, per_machine=4, zone=zone) for zone in zones))
    nodes = equal_nodes(case.cluster, ["A100-40"])
    plan = to_plan(AtlasLayout(4, 1, 2, 1, ("us-central1",) * 2), case, nodes)
    assert isinstance(plan, Plan)
    assert [stage.place.zone for stage in plan.pipelines[0].stages] == list(zones)


def test_a_region_without_enough_machines_gives_a_reason():
    # Machines of four, and each zone has half a machine more, where no group of four can stand.
    zones = ("us-central1-a", "us-central1-b")
    case = small_case(*(pool("A100-40", 6, per_machine=4, zone=zone) for zone in zones))
    nodes = equal_nodes(case.cluster, ["A100-40"])
    inputs = inputs_from(case, nodes, "published")
    assert inputs is not None
    assert inputs.regions == (AtlasRegion("us-central1", (6, 6)),)
    found = AtlasPlanner().proposals(case, "published")
    reasons = [one for one in found if one.plan is None]
    assert reasons
    assert all(one.seconds == math.inf and "run out" in one.why_not for one in reasons)
    assert all(one.plan for one in AtlasPlanner().proposals(case, "fixed"))
    layout = AtlasLayout(4, 3, 1, 1, ("us-central1",))
    assert isinstance(to_plan(layout, case, nodes), str)
