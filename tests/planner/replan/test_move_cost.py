"""The cost of a move: shared network cards, egress, lost steps, and downtime by phase."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from planner.replan.move_cost import (
    DEFAULT_TIMES,
    MoveCost,
    cost_of_move,
    fetch_seconds,
)
from planner.replan.nodes import PlannerNode
from planner.replan.past_moves import PastMove
from planner.replan.state_map import TrainingState
from planner.replan.transfers import RestoreTransfer, Transfer, Transfers
from simulator.hardware.catalogue import load_catalogue
from simulator.network.network import MeasuredNetwork, Network
from simulator.spec.plan import Pipeline, Place, Plan, Stage

ZONES = ("us-central1-a", "us-west1-b")
USD_PER_BYTE = 1e-8
NETWORK = Network(
    load_catalogue(),
    MeasuredNetwork(egress_usd_per_byte={ZONES: USD_PER_BYTE, ZONES[::-1]: USD_PER_BYTE}),
)
GB = 1e9
NODES = [PlannerNode(f"n{i}", "A100-40", "A100-40x4", ZONES[0], 4) for i in range(40)]
FAR = PlannerNode("far", "A100-40", "A100-40x4", ZONES[1], 4)
FARTHER = replace(FAR, id="farther")
STATE = TrainingState(np.array([8 * GB, 8 * GB, 0.0]), 4)


def moved(*ways: tuple[str, str, float], restored: float = 0.0) -> Transfers:
    return Transfers(
        tuple(Transfer(source, target, (0,), size) for source, target, size in ways),
        (RestoreTransfer("n3", (1,), restored),) if restored else (),
        (1,) if restored else (),
        0.0,
        0.0,
    )


def seconds(transfers: Transfers, network: Network = NETWORK) -> float:
    return fetch_seconds(transfers, [*NODES, FAR, FARTHER], network, DEFAULT_TIMES)


def placed() -> Plan:
    place = Place("A100-40", "A100-40x4", ZONES[0], "n0", (0, 1, 2, 3))
    return Plan(1, (Pipeline(4, (Stage((0, 2), 4, (place,)),)),))


def cost(
    transfers: Transfers, *, is_planned: bool, plan: Plan | None = None, **options: object
) -> MoveCost:
    return cost_of_move(
        plan or placed(),
        transfers,
        [*NODES, FAR],
        state=STATE,
        network=NETWORK,
        old_iteration_s=10.0,
        new_iteration_s=8.0,
        is_planned=is_planned,
        usd_per_hour=36.0,
        **options,  # type: ignore[arg-type]  # by name
    )


def test_transfers_share_the_senders_network_card() -> None:
    alone = seconds(moved(("n0", "n1", GB)))
    assert alone > 0
    apart = seconds(moved(("n0", "n1", GB), ("n2", "n3", GB)))
    assert apart == pytest.approx(alone)
    # One flow does not fill a network card, this many do.
    others = [node.id for node in NODES if node.id != "n0"]
    from_one = seconds(moved(*(("n0", other, GB) for other in others)))
    into_one = seconds(moved(*((other, "n0", GB) for other in others)))
    assert from_one == pytest.approx(into_one)
    assert from_one > 2 * alone
    ends = NODES[0].place, NODES[1].place
    together = NETWORK.between_nodes(*ends, flows=len(others), bytes_each=GB)
    assert from_one == pytest.approx(together)


def test_a_link_between_zones_is_shared_by_all() -> None:
    slow = replace(NETWORK, zone_caps={ZONES: 0.1 * GB})
    one = seconds(moved(("n0", "far", GB)), slow)
    assert one == pytest.approx(10.0)
    two = seconds(moved(("n0", "far", GB), ("n1", "farther", GB)), slow)
    assert two == pytest.approx(20.0)
    assert seconds(moved(("far", "n0", GB)), slow) < 10.0, "the cap has a direction"


def test_restored_state_arrives_at_the_restore_rate() -> None:
    pace = DEFAULT_TIMES.restore_bytes_per_s
    assert seconds(moved(restored=100 * pace)) == pytest.approx(100.0)


def test_the_phases_sum_to_the_downtime_and_the_first_step() -> None:
    found = cost(moved(("n0", "n1", GB)), is_planned=False)
    parts = [getattr(found.phases, field.name) for field in fields(found.phases)]
    assert all(part > 0 for part in parts)
    assert found.phases.total_s == pytest.approx(sum(parts))
    assert found.downtime_s == pytest.approx(sum(parts) - 8.0)
    assert found.seconds == pytest.approx(found.downtime_s + 0.5 * 10.0)
    assert found.rent_usd == pytest.approx(found.downtime_s / 100)


def test_a_planned_move_repeats_no_step_and_needs_no_detection() -> None:
    found = cost(moved(("n0", "n1", GB)), is_planned=True)
    assert found.steps_lost == 0
    assert found.phases.detect_s == found.phases.plan_s == 0
    # After half a step, which counts, four devices seal 16 GB at the pace of a copy.
    seal_s = 4 * GB / DEFAULT_TIMES.copy_bytes_per_s
    assert found.phases.quiesce_s == pytest.approx(10.0 / 2 + seal_s)
    assert found.trained_s == 10.0 / 2 + 8.0


def test_a_gpu_alone_meets_no_others() -> None:
    place = Place("A100-40", "A100-40x4", ZONES[0], "n0", (0,))
    alone = Plan(1, (Pipeline(4, (Stage((0, 2), 1, (place,)),)),))
    found = cost(moved(), is_planned=True, plan=alone)
    together = cost(moved(), is_planned=True)
    assert (found.phases.fetch_s, together.phases.fetch_s > 0) == (0.0, True)
    checks_s = (together.phases.verify_s - DEFAULT_TIMES.collectives_s) * 4
    assert found.phases.verify_s == pytest.approx(checks_s)


def test_earlier_moves_correct_the_phases_and_the_downtime() -> None:
    transfers = moved(("n0", "n1", GB))
    plain = cost(transfers, is_planned=False)
    assert plain.uncorrected == plain.phases
    tenth = tuple((name, seconds / 10) for name, seconds in plain.phases.by_name.items())
    past = PastMove(False, tuple(plain.phases.by_name.items()), tenth)
    found = cost(transfers, is_planned=False, times=replace(DEFAULT_TIMES, past=(past,)))
    assert found.uncorrected == plain.phases
    assert dict(tenth)["fetch"] == pytest.approx(found.phases.fetch_s)
    assert found.phases.total_s == pytest.approx(plain.phases.total_s / 10, rel=0.01)
    assert 0 <= found.downtime_s < plain.downtime_s / 9
    planned = cost(transfers, is_planned=True, times=replace(DEFAULT_TIMES, past=(past,)))
    assert planned.phases == planned.uncorrected


def test_rarer_snapshots_repeat_more_steps() -> None:
    times = replace(DEFAULT_TIMES, snapshot_every_steps=11)
    assert cost(moved(), is_planned=False, times=times).steps_lost == 5.5
    assert cost(moved(), is_planned=True, times=times).steps_lost == 0


def test_egress_is_paid_between_zones_only() -> None:
    found = cost(moved(("n0", "far", 2 * GB), ("n0", "n1", GB)), is_planned=True)
    assert found.egress_usd == pytest.approx(2 * GB * USD_PER_BYTE)


def test_devices_that_keep_their_state_load_nothing() -> None:
    still = cost(moved(), is_planned=True)
    assert still.phases.rebuild_s == 0
    assert cost(moved(("n0", "n1", GB)), is_planned=True).phases.rebuild_s > 0


def test_groups_are_made_while_state_is_fetched() -> None:
    meeting = cost(moved(), is_planned=True).phases.fetch_s
    assert meeting == DEFAULT_TIMES.groups_s + DEFAULT_TIMES.group_s_per_node
    long = moved(("n0", "n1", 1000 * GB))
    assert cost(long, is_planned=True).phases.fetch_s == pytest.approx(seconds(long))


def test_meeting_time_grows_with_the_round_trips_between_nodes() -> None:
    near, far = (
        cost_of_move(
            _two_stages(other), moved(), [*NODES, FAR], state=STATE, network=NETWORK,
            old_iteration_s=1.0, new_iteration_s=1.0, is_planned=True, usd_per_hour=None,
        ).phases.fetch_s
        for other in (NODES[1], FAR)
    )  # fmt: skip
    here, there = NODES[0].place, FAR.place
    trip_s = NETWORK.latency(here, there) + NETWORK.latency(there, here)
    close_s = 2 * NETWORK.latency(here, NODES[1].place)
    trips = DEFAULT_TIMES.meeting_round_trips + 3 * DEFAULT_TIMES.group_round_trips
    assert far - near == pytest.approx(trips * (trip_s - close_s))


def _two_stages(other: PlannerNode) -> Plan:
    places = [
        Place(node.gpu, node.machine, node.zone, node.id, (0, 1, 2, 3))
        for node in (NODES[0], other)
    ]
    stages = (Stage((0, 1), 4, (places[0],)), Stage((1, 2), 4, (places[1],)))
    return Plan(1, (Pipeline(4, stages),))
