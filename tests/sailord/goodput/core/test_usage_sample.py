"""What a sample books each node on, from the controller's state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.records import PREPARING, ComputeTimes, NodeId
from sailord.core.model.events import NodesObserved
from sailord.core.model.phases import Closing, Held, Opening, Starting, Stopping, Waiting
from sailord.core.model.state import State
from sailord.core.model.stragglers import NodeSpeeds, Straggler
from sailord.core.sharing.parts import whole
from sailord.goodput.core.causes import label_of
from sailord.goodput.core.ledger import UsageSample
from sailord.goodput.core.usage_sample import (
    Rented,
    Renting,
    newest_lives,
    sample_usage,
    with_other_jobs,
)
from tests.sailord.core.sharing_states import act, both_train
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    A,
    B,
    C,
    D,
    G,
    Planning,
    changed,
    generation,
    job,
    node,
    proposal,
    record,
    report,
    state,
)

NOTHING = Renting()


def seen(state: State, renting: Renting = NOTHING, **others: Any) -> UsageSample:
    return sample_usage(state, lambda _: 2.0, renting, **others)


def held(state: State, renting: Renting = NOTHING, **others: Any) -> dict[str, int]:
    return {each.cause: each.gpus for each in seen(state, renting, **others).loads}


IDLE_C, IDLE_D = node(C, report(C, "idle")), node(D, report(D, "idle"))


def test_members_of_a_running_generation_are_in_a_step_and_others_unused() -> None:
    here = state(None, node(A), node(B), IDLE_C)
    assert held(here) == {"step_under_way": 2, "unused": 1}
    assert seen(here).step is not None
    assert {each.cause: each.usd_per_hour for each in seen(here).loads} == {
        "step_under_way": 4.0, "unused": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("taking", "cause"),
    [
        ("fetching", "moving_fetch"),
        ("rebuilding", "moving_rebuild"),
        ("verifying", "moving_verify"),
        ("running", "moving_first_step"),
    ],
)
def test_a_starting_member_is_booked_on_its_reported_phase(taking: Any, cause: str) -> None:
    starts = state(Starting(NOW, NOW + 60, 1.0), node(A, report(A, taking)), node(B))
    assert held(starts)[cause] == 2 if taking == "running" else 1


def test_a_new_leader_assumes_that_the_generation_still_trains() -> None:
    starts = state(Starting(NOW, NOW + 60, 1.0), replace(node(A), report=None), node(B))
    assert held(starts, trained=(JOB, G.number)) == {"step_under_way": 2}
    assert "step_under_way" not in held(starts, trained=(JOB, G.number - 1))


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        (Waiting("a loss", NOW), "moving_detect"),
        (Planning(4, (A, B), "a loss", True, NOW + 60, before=Waiting("", NOW)), "moving_plan"),
        (Opening(generation(number=4), proposal(A, B)), "moving_quiesce"),
        (Closing("paused", "ordered"), "moving_quiesce"),
        (Held("failures", NOW), "held"),
    ],
)
def test_each_phase_of_a_job_that_does_not_train_is_a_cause(phase: Any, cause: str) -> None:
    assert held(state(phase)) == {cause: 2}


def test_waiting_is_booked_on_capacity_after_a_refusal_and_on_recovering_during_a_backoff() -> None:
    waits = Waiting("a loss", NOW)
    idle = (node(A, report(A, "idle")), node(B, report(B, "idle")))
    assert held(state(waits, *idle, is_refused=True)) == {"waiting_for_capacity": 2}
    assert held(state(waits, *idle, not_before=NOW + 5)) == {"recovering": 2}


def test_waiting_for_a_plan_that_dollars_rule_out_is_booked_on_an_order() -> None:
    idle = (node(A, report(A, "idle")), node(B, report(B, "idle")))
    unpaid = state(Waiting("a loss", NOW), *idle, is_refused=True, is_unpaid=True)
    assert held(unpaid) == {"held": 2}
    assert label_of("held") == "waiting for an order"
    # Where sailord rents, cheaper instances may come.
    rents = replace(unpaid, options=replace(unpaid.options, reserve_s=60.0))
    assert held(rents) == {"waiting_for_capacity": 2}


def test_a_stopped_member_waits_for_the_others() -> None:
    stops = Stopping(proposal(A, B), "a better plan", NOW + 60)
    here = state(stops, node(A, report(A, "stopped")), node(B))
    assert held(here, trained=(JOB, G.number)) == {"moving_quiesce": 1, "step_under_way": 1}


def test_nodes_outside_the_plan_are_booked_on_their_own_state() -> None:
    here = state(
        None,
        node(A),
        node(B),
        changed(IDLE_C, draining_since=NOW),
        changed(IDLE_D, slow="it computes 3 times as long"),
    )
    assert held(here) == {"step_under_way": 2, "leaving": 1, "slow_node": 1}
    prepares = node(C, report(C, "idle", unfit=PREPARING))
    assert held(state(None, node(A), node(B), prepares))["booting"] == 1


def test_without_a_job_nodes_are_booked_on_the_reason() -> None:
    idle = replace(state(None), active=None)
    assert held(idle) == {"paused": 2} if idle.jobs[JOB].state == "paused" else {"no_job": 2}
    assert held(replace(idle, jobs={JOB: job(state="paused")})) == {"paused": 2}


def test_rented_instances_are_paid_for_while_no_agent_runs_there() -> None:
    boots = Rented("machine-x", 8, 20.0, has_joined=False, is_leaving=False)
    gone, used = (replace(boots, name=f"machine-{x}", has_joined=True) for x in "ya")
    found = seen(state(None), Renting((boots, gone, used)))
    assert {each.cause: (each.gpus, each.rented_gpus) for each in found.loads} == {
        "step_under_way": (9, 8), "booting": (8, 8), "lost": (8, 8),
    }  # fmt: skip


def test_a_node_of_an_ended_instance_is_not_booked_as_a_node_of_the_operators() -> None:
    ended = frozenset({"machine-b", "forgotten"})
    assert held(state(None), Renting(ended_nodes=ended)) == {"step_under_way": 1}
    again = Rented("machine-b", 1, 20.0, has_joined=True, is_leaving=False)
    assert held(state(None), Renting((again,), ended)) == {"step_under_way": 2}, "a new one"


def test_a_machine_that_rebooted_is_paid_for_once() -> None:
    again = replace(IDLE_C, record=record(C, name="machine-a"), since=NOW)
    for nodes in ((node(A), node(B), again), (again, node(A), node(B))):
        assert held(state(None, *nodes)) == {"step_under_way": 1, "unused": 1}


def test_a_stragglers_delay_is_measured_from_its_ranks() -> None:
    said = report(A, busy=((0, 3.0),)), report(B, busy=((1, 1.0),))
    slow = {A: Straggler(3.0, "others", BEGAN, 1, 40)}
    here = state(None, node(A, said[0]), node(B, said[1]), speeds=NodeSpeeds(slow=slow))
    assert here.active is not None
    predicted = replace(G, busy=ComputeTimes((1.0, 1.0)))
    step = seen(replace(here, active=replace(here.active, generation=predicted))).step
    assert step is not None
    assert (step.busy_s, step.slow_s) == (2.0, 2.0)


def test_gpus_of_jobs_that_share_are_added_and_their_steps_are_training() -> None:
    first, other = seen(state(None, node(A), node(B), IDLE_C)), seen(state(None, node(A), node(B)))
    both = with_other_jobs(first, [other])
    assert {each.cause: (each.gpus, each.usd_per_hour) for each in both.loads} == {
        "step_under_way": (2, 4.0), "training": (2, 4.0), "unused": (1, 2.0),
    }  # fmt: skip
    assert both.step == first.step
    (beside,) = both.beside
    assert [(each.cause, each.gpus) for each in beside.loads] == [("training", 2)]


def test_a_machine_whose_agent_restarts_is_booked_once_though_two_parts_have_a_life_of_it() -> None:
    parts = both_train()
    there = *map(record, (A, B, C, D)), record(NodeId("d2"), name="machine-d")
    parts, _ = act(parts, NodesObserved(NOW + 2, there))
    lives = newest_lives(whole(parts))
    first, other = (sample_usage(each, lambda _: 2.0, NOTHING, lives=lives) for each in parts.all())
    assert sum(each.gpus for each in with_other_jobs(first, [other]).loads) == 4
