"""Rules about nodes that no other test guards; each was found by a mutation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.records import JobId, NodeId
from agents.protocol.versions import Protocol
from sailord.core.decide import decide
from sailord.core.model.commands import Note, ProbeAgent
from sailord.core.model.events import (
    Elected,
    NodesObserved,
    OrderGiven,
    PlanFound,
    Reported,
    Ticked,
)
from sailord.core.model.nodes import Nodes
from sailord.core.model.phases import Opening, Phase, Running, Waiting
from sailord.core.model.standing import Lost
from sailord.core.model.state import State
from sailord.core.model.stragglers import NodeSpeeds, Straggler
from sailord.core.queries.replan_triggers import replan_trigger, usable
from sailord.core.queries.restore_choice import in_memory
from sailord.core.queries.straggler_queries import straggler_texts, to_leave_out
from tests.sailord.core.states import (
    BEGAN,
    FROM_NOTHING,
    NOW,
    STARTING,
    A,
    B,
    C,
    D,
    G,
    Planning,
    act,
    active_of,
    changed,
    job,
    node,
    order,
    phase,
    proposal,
    report,
    state,
)

SEES_A_LIMP = NodeSpeeds(
    3, 10, NOW - 0.5, {"A100-40": 1.0}, {}, {A: Straggler(3.0, "others", NOW - 61, 10, 40)}
)


def test_draining_starts_when_it_is_first_seen() -> None:
    draining = replace(node(B).record, state="draining")
    first, _ = act(state(), NodesObserved(NOW, (node(A).record, draining)))
    again, _ = act(first, NodesObserved(NOW + 3, (node(A).record, draining)))
    assert again.nodes[B].exclusion.draining_since == NOW


@pytest.mark.parametrize("trouble", [{"absent_since": NOW - 30.0}, {"address": ""}])
def test_node_without_lease_or_address_is_not_probed(trouble: dict[str, Any]) -> None:
    c = node(C, heard_at=0.0, report=None)
    if "address" in trouble:
        c = replace(c, record=replace(c.record, address=""))
    else:
        c = changed(c, absent_since=NOW - 0.1)
    _, commands = act(state(None, node(A), node(B), c), Ticked(NOW))
    assert ProbeAgent(C) not in commands


def test_no_node_ready_has_no_reason_if_all_are_lost() -> None:
    gone = (node(n, lost_at=NOW - 5, why_lost="gone") for n in (A, B))
    before = state(Waiting("a reason", NOW - 1), *gone)
    notes = [each.text for each in decide(before, Ticked(NOW))[1] if isinstance(each, Note)]
    assert notes == ["no node is ready"]


def test_lost_node_does_not_explain_why_no_node_is_ready() -> None:
    broken = node(A, report(A, "idle", fault="its device fell off the bus"))
    lost = node(B, report(B, "idle", fault="it burned"), lost_at=NOW - 5, why_lost="gone")
    before = state(Waiting("a reason", NOW - 1), broken, lost)
    notes = [each.text for each in decide(before, Ticked(NOW))[1] if isinstance(each, Note)]
    assert notes == ["no node is ready: machine-a: its device fell off the bus"]


NOTABLE = {
    "report": None,
    "lost_at": NOW,
    "absent_since": NOW,
    "unreachable_since": NOW,
    "failed_since": NOW,
    "broken_since": NOW,
    "draining_since": NOW,
}


@pytest.mark.parametrize("what", NOTABLE)
def test_node_that_is_not_well_is_notable(what: str) -> None:
    assert not node(A).is_notable
    peers = report(A, broken_peers=(B,))
    assert node(A, peers).is_notable
    assert changed(node(A), **{what: NOTABLE[what]}).is_notable


def test_withdraw_clears_the_departure_time() -> None:
    going = node(B, draining_since=NOW - 9)
    going = replace(going, record=replace(going.record, state="draining", leaves_at=NOW + 30))
    after, _ = act(
        state(None, node(A), going), NodesObserved(NOW, (node(A).record, node(B).record))
    )
    assert (after.nodes[B].exclusion.draining_since, after.nodes[B].record.leaves_at) == (
        None,
        None,
    )


def test_report_ends_unreachable() -> None:
    silent = node(B, unreachable_since=NOW - 1)
    after, _ = act(state(None, node(A), silent), Reported(NOW, report(B, number=9)))
    assert not after.nodes[B].is_unreachable


@pytest.mark.parametrize("kept_out", [{"is_cordoned": True}, {"slow": "3 times as slow"}])
def test_uncordon_clears_cordon_and_straggler_mark(kept_out: dict[str, Any]) -> None:
    before = state(None, node(A), node(B), node(C, **kept_out))
    after, _ = act(before, OrderGiven(NOW, order("uncordon", C)))
    back = after.nodes[C]
    assert back.is_usable(is_member=False)
    assert (back.exclusion.is_cordoned, back.exclusion.slow, back.returned_at) == (False, "", NOW)


def test_question_without_stragglers_names_no_factors() -> None:
    assert straggler_texts(state()) == {}


def test_stragglers_are_left_out_only_while_running() -> None:
    for at, found in ((Running(BEGAN), {A}), (STARTING, set())):
        nodes = (node(n) for n in (A, B, C, D, NodeId("e"), NodeId("f"), NodeId("g"), NodeId("h")))
        now = state(at, *nodes, speeds=SEES_A_LIMP)
        assert to_leave_out(now, active_of(now)).keys() == found


def test_departure_time_of_a_notice_survives_the_nodes_own_record() -> None:
    warned, _ = act(state(), OrderGiven(NOW, order("preempt", B, leaves_at=NOW + 30)))
    after, _ = act(warned, NodesObserved(NOW + 1, (node(A).record, node(B).record)))
    assert after.nodes[B].record.leaves_at == NOW + 30


def test_gathering_window_starts_with_the_newest_node() -> None:
    old, new = node(C, since=NOW - 100), node(D, since=NOW - 4)
    now = state(None, node(A), node(B), old, new)
    change = replan_trigger(now, active_of(now))
    assert change is not None
    assert change.due == NOW - 4 + now.options.additions_gather_s


def test_a_node_whose_drain_or_cordon_was_taken_back_counts_as_back_not_as_new() -> None:
    now = state(None, node(A), node(B), node(C, returned_at=NOW - 1), node(D))
    change = replan_trigger(now, active_of(now))
    assert change is not None
    assert change.reason == "machine-c could help again; machine-d could help"


@pytest.mark.parametrize(("of", "is_lost"), [(3, True), (2, False)])
def test_broken_peers_of_another_generation_are_ignored(of: int, is_lost: bool) -> None:
    says = node(A, report(A, of=of, broken_peers=(B,)))
    silent = node(B, unreachable_since=NOW - 0.05)
    after, _ = act(state(None, says, silent), Ticked(NOW))
    assert after.nodes[B].is_lost is is_lost


def test_broken_connection_counts_from_its_first_report() -> None:
    broken = node(B, report(B, "broken"), broken_since=NOW - 0.05)
    after, _ = act(state(None, node(A), broken), Reported(NOW, report(B, "broken", number=9)))
    assert after.nodes[B].workers.broken_since == NOW - 0.05


@pytest.mark.parametrize(
    ("ran", "step_s"),
    [
        (Running(BEGAN), 0.7),
        (
            Planning(1, (A, B), "a better plan may exist", False, NOW + 60, before=Running(BEGAN)),
            0.7,
        ),
        (Running(NOW - 0.5), 0.5),
        (STARTING, 0.5),
    ],
    ids=["steps", "while the planner is asked", "the first of a generation", "before it runs"],
)
def test_step_time_is_a_moving_average_of_steps(ran: Phase | Planning, step_s: float) -> None:
    before = state(ran, step_s=0.5, advanced_at=NOW - 0.5)
    after, _ = act(before, Reported(NOW + 2, report(A, step=41, number=9)))
    assert active_of(after).progress.step_s == pytest.approx(step_s)
    assert (active_of(after).progress.step, active_of(after).progress.advanced_at) == (41, NOW + 2)


def test_joining_node_is_new_once_it_is_ready() -> None:
    joining = node(C, since=NOW - 60)
    joining = replace(joining, record=replace(joining.record, state="joining"))
    seen = NodesObserved(NOW, tuple(node(n).record for n in (A, B, C)))
    assert act(state(None, node(A), node(B), joining), seen)[0].nodes[C].since == NOW


def test_orders_about_lost_nodes_are_dropped_first() -> None:
    said = (order("cordon", B, "it"),)
    marks = {B: said, **{NodeId(f"gone-{n}"): (order("cordon", C, f"x{n}"),) for n in range(5000)}}
    after, _ = act(replace(state(), marks=marks), OrderGiven(NOW, order("cordon", A)))
    assert after.marks[B] == said
    assert len(after.marks) < 5000


def test_time_and_reason_of_a_loss_stay() -> None:
    gone = node(B, absent_since=NOW - 90, heard_at=NOW - 90, lost_at=NOW - 50, why_lost="it burned")
    before = state(None, node(A), gone, advanced_at=NOW - 80)
    after, _ = act(before, Ticked(NOW))
    assert after.nodes[B].standing == Lost(NOW - 50, "it burned", NOW - 90)


def test_lease_ends_unreachable() -> None:
    away = node(B, absent_since=NOW - 1, unreachable_since=NOW - 1)
    seen = NodesObserved(NOW, (node(A).record, node(B).record))
    assert not act(state(None, node(A), away), seen)[0].nodes[B].is_unreachable


@pytest.mark.parametrize(("heard_at", "opens"), [(NOW - 5, False), (NOW - 0.5, True)])
def test_generation_waits_for_a_member_without_a_lease(heard_at: float, opens: bool) -> None:
    """It may have the newest step, and be cut off from the store alone."""
    away = node(B, report(B, "idle"), absent_since=NOW - 1, heard_at=heard_at)
    before = state(replace(FROM_NOTHING, nodes=(A,)), node(A, report(A, "idle")), away)
    after, _ = act(before, PlanFound(NOW, FROM_NOTHING.request, proposal(A)))
    assert isinstance(phase(after), Opening) is opens


def test_cordoned_member_stays_usable_but_no_other_cordoned_node() -> None:
    nodes = (node(n, is_cordoned=n != B) for n in (A, B, C))
    now = state(None, *nodes)
    assert usable(now, active_of(now)) == (A, B)
    gone = replace(now, nodes=now.nodes.with_({A: changed(now.nodes[A], absent_since=NOW)}))
    assert usable(gone, active_of(now)) == (B,)
    assert usable(replace(now, nodes=Nodes({B: now.nodes[B]})), active_of(now)) == (B,)


def test_second_drain_keeps_the_first_start() -> None:
    warned, _ = act(state(), OrderGiven(NOW, order("preempt", B, leaves_at=NOW + 30)))
    again, _ = act(warned, OrderGiven(NOW + 5, order("drain", B, "another")))
    assert again.nodes[B].exclusion.draining_since == NOW


def test_snapshots_of_another_job_are_ignored() -> None:
    theirs = node(B, report(B, "idle", job=JobId("other")))
    now = state(None, node(A), theirs)
    assert {id_ for id_, _ in in_memory(now, active_of(now).job)} == {A}


def test_failure_counts_from_its_first_report() -> None:
    failed = node(B, report(B, "failed", failure="it broke"), failed_since=NOW - 0.05)
    again = Reported(NOW, report(B, "failed", number=9, failure="it broke"))
    assert act(state(None, node(A), failed), again)[0].nodes[B].workers.failed_since == NOW - 0.05


def test_node_is_free_since_it_came_or_was_given_back() -> None:
    assert node(A, since=5.0).free_since == 5.0
    assert node(A, since=5.0, returned_at=9.0).free_since == 9.0
    assert node(A, since=9.0, returned_at=5.0).free_since == 9.0


def test_node_at_another_address_is_probed_anew() -> None:
    silent = node(B, unreachable_since=NOW - 1, probed_at=NOW - 1)
    moved = replace(node(B).record, address="10.0.0.9:7")
    after, _ = act(state(None, node(A), silent), NodesObserved(NOW, (node(A).record, moved)))
    assert not after.nodes[B].is_unreachable


@pytest.mark.parametrize(
    ("facts", "is_usable"),
    [
        ({}, True),
        ({"slow": "3 times as slow"}, False),
        ({"lost_at": NOW}, False),
        ({"absent_since": NOW}, False),
        ({"draining_since": NOW}, False),
        ({"is_cordoned": True}, False),
        ({"report": report(A, fault="it burns")}, False),
        ({"report": report(A, unfit="it is full")}, False),
    ],
    ids=["well", "slow", "lost", "absent", "leaving", "cordoned", "faulty", "full"],
)
def test_usable_nodes(facts: dict[str, Any], is_usable: bool) -> None:
    assert node(A, **facts).is_usable(is_member=False) is is_usable


def test_node_whose_record_turns_unreadable_goes_on_but_is_in_no_new_plan():
    odd, _ = act(state(), NodesObserved(NOW, (node(A).record,), frozenset({B})))
    assert (odd.nodes[B].absent_since, odd.nodes[B].record) == (None, node(B).record)
    assert odd.nodes[B].is_usable(is_member=True)
    assert not odd.nodes[B].is_usable(is_member=False)
    assert odd.nodes[B].why_unusable.endswith("upgrade sailord first, or read its log")
    again, _ = act(odd, NodesObserved(NOW + 1, (node(A).record, node(B).record)))
    assert again.nodes[B].is_usable(is_member=False)


def test_node_of_another_protocol_is_in_no_new_plan():
    later = replace(node(B).record, protocol=Protocol(9, 8))
    seen, _ = act(state(), NodesObserved(NOW, (node(A).record, later)))
    assert seen.nodes.free == (A,)
    assert seen.nodes[B].why_unusable == (
        "its agent understands protocol 8 and later, and sailord speaks 1: upgrade sailord first"
    )


def test_member_without_a_readable_record_is_not_given_up_by_a_new_leader():
    taken, _ = act(
        State(), Elected(NOW, 9, nodes=(node(A).record,), jobs=(job(),), generations=(G,))
    )
    assert taken.nodes[B].absent_since is not None
    seen, _ = act(taken, NodesObserved(NOW + 1, (node(A).record,), frozenset({B})))
    assert seen.nodes[B].absent_since is None
