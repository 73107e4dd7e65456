"""When instances of leaving, absent and unused nodes are given back, by the cluster's own state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import JobId, Point, Restore, name_in
from agents.saved_state import SavedState
from sailord.capacity.core.model import (
    AgentsCounted,
    CapacityPolicy,
    CapacityState,
    DeleteInstances,
    Drain,
    PricesRead,
    TargetSet,
)
from sailord.capacity.core.planner_view import agents_of, holding, pool_supplies
from sailord.capacity.core.supply import supply
from sailord.core.model.events import Ticked
from sailord.core.model.nodes import Node, Nodes
from sailord.core.model.phases import Starting
from sailord.core.model.state import Progress, State
from sailord.core.node_lifecycle import grant_grace
from tests.sailord.capacity.core.story import A as POOL
from tests.sailord.capacity.core.story import Story, instance
from tests.sailord.core.states import (
    NOW,
    A,
    B,
    C,
    act,
    durable,
    generation,
    node,
    record,
    report,
    state,
)

SURPLUS_S, LOST_S = CapacityPolicy().surplus_s, CapacityPolicy().lost_s
G4 = generation(B, C, number=4, restore=Restore(Point(40, 3), "memory"))
PARKED = report(A, "stopped")
"""It was a member of the third generation, and has its last step."""


class Cluster:
    """Rented instances of ``a``, ``b`` and ``c``, and what sailord knows of their nodes."""

    def __init__(self, now: State, wanted: int | None = None) -> None:
        self.now = now
        self.rented = [
            replace(instance(i), node=each.record.name, pool=replace(POOL, gpus=1))
            for i, each in enumerate(now.nodes.values())
        ]
        pool, count = self.rented[0].pool, len(self.rented) if wanted is None else wanted
        self.story = Story().hear(PricesRead(1.0, {pool: 3.6})).see(11.0, *self.rented)
        self.story.hear(TargetSet(11.0, {pool: count}))

    def live(self, seconds: float, now: State | None = None) -> list[str]:
        """Count agents every 20 s in this time; return the nodes that were deleted."""
        if now is not None:
            self.now = now
        at, end, gone, self.drained = self.story.state.now, self.story.state.now + seconds, [], []
        while at < end:
            at = min(at + 20.0, end)
            agents, in_use = agents_of(self.now)
            self.story.hear(AgentsCounted(at, agents, in_use, holding(self.now)))
            gone += [id_ for order in self.story.of(DeleteInstances) for id_ in order.ids]
            self.drained += [order.node for order in self.story.of(Drain)]
        return [self.rented[int(id_)].node for id_ in gone]

    @property
    def count(self) -> int:
        """How many instances are usable or requested."""
        return sum(supply(self.story.state).values())


def moved(left: Node, *sealed: int) -> State:
    """The job moved from ``a`` to ``b`` and ``c``, whose generation has sealed these steps."""
    taking, phase = ("running", None) if sealed else ("preparing", Starting(NOW, NOW + 60, 5.0))
    members = (node(i, report(i, taking, step=50, sealed=sealed, of=4)) for i in (B, C))
    return state(phase, left, *members, generation=G4)


# ---- drained by an operator ---------------------------------------------------------------------

STAYS = report(A, "idle", step=0, sealed=())


def test_an_instance_that_an_operator_drained_is_deleted_after_surplus_s():
    cluster = Cluster(moved(node(A, STAYS), 50))
    assert cluster.live(60) == []
    assert cluster.live(SURPLUS_S, moved(node(A, STAYS, draining_since=NOW), 50)) == []
    assert cluster.count == 3, "another one was requested in its place"
    assert cluster.live(20) == ["machine-a"]
    assert "it was drained" in {m.why for m in cluster.story.state.instances.values()}


def test_an_instance_whose_drain_is_withdrawn_is_usable_again():
    cluster = Cluster(moved(node(A, STAYS), 50))
    leaves = moved(node(A, STAYS, draining_since=NOW), 50)
    assert cluster.live(SURPLUS_S - 20, leaves) == []
    usable = cluster.count
    assert cluster.live(40, moved(node(A, STAYS), 50)) == []
    assert cluster.count == usable + 1
    assert cluster.live(SURPLUS_S, leaves) == [], "the time begins anew"
    assert cluster.live(20) == ["machine-a"]


def test_an_instance_that_is_drained_stays_until_the_job_has_left_it():
    member = node(B, report(B), draining_since=NOW)
    cluster = Cluster(state(None, node(A), member))
    assert cluster.live(3 * SURPLUS_S) == []
    idle = node(B, report(B, "idle", sealed=()), draining_since=NOW)
    assert cluster.live(SURPLUS_S, state(None, node(A), idle, generation=generation(A))) == []
    assert cluster.live(20) == ["machine-b"]


def test_an_instance_whose_node_is_quarantined_is_replaced_and_stays():
    cluster = Cluster(moved(node(A, STAYS), 50))
    assert cluster.live(20) == []
    assert cluster.story.asks() == []
    out = moved(node(A, STAYS, wrong_bits="its bits differ"), 50)
    assert cluster.live(20, out) == []
    assert sum(count for _, count in cluster.story.asks()) == 1
    assert cluster.live(3 * SURPLUS_S) == []
    assert cluster.drained == []


def test_a_quarantined_node_that_is_not_rented_is_no_supply():
    def supplies(*others: Node) -> list[tuple[int, int, int]]:
        found = pool_supplies(CapacityState(), (), state(None, node(A), *others))
        return [(each.up, each.unrented, each.ready) for each in found]

    assert supplies(node(B)) == [(2, 2, 2)]
    assert supplies(node(B, wrong_bits="its bits differ")) == [(1, 1, 1)]


# ---- left by the job ----------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [2, 0], ids=["surplus", "all surplus"])
def test_an_instance_is_kept_while_others_fetch_the_state_from_it(wanted):
    cluster = Cluster(moved(node(A, PARKED)), wanted)
    assert cluster.live(SURPLUS_S + 60) == []
    assert "machine-a" in cluster.drained, "no later state is put there"
    assert cluster.live(20, moved(node(A, PARKED), 50)) == ["machine-a"]


def test_an_instance_that_was_drained_is_kept_while_others_fetch_the_state_from_it():
    both = state(None, node(A), node(B))
    cluster = Cluster(both, wanted=0)
    assert cluster.live(SURPLUS_S + 60) == []
    assert cluster.drained == ["machine-a", "machine-b"]
    left = node(A, PARKED, draining_since=NOW)
    assert cluster.live(600, moved(left)) == []
    assert cluster.live(20, moved(left, 50)) == ["machine-a"]


def test_an_instance_that_has_not_reported_its_snapshots_is_kept():
    silent = replace(node(A), report=None)
    cluster = Cluster(moved(silent), wanted=2)
    assert cluster.live(SURPLUS_S + 60) == []
    assert cluster.live(20, moved(replace(node(A, unreachable_since=NOW), report=None))) == [
        "machine-a"
    ], "it will not tell"


@pytest.mark.parametrize("job", ["ended", "another"])
def test_state_that_the_active_job_does_not_need_keeps_no_instance(job):
    left = node(A, replace(PARKED, job=JobId("another"))) if job == "another" else node(A, PARKED)
    now = moved(left)
    now = replace(now, active=None) if job == "ended" else now
    cluster = Cluster(now, wanted=0 if job == "ended" else 2)
    assert "machine-a" in cluster.live(SURPLUS_S + 60)


def test_a_checkpoint_of_the_new_generation_releases_the_old_instances():
    now = moved(node(A, PARKED))
    cluster = Cluster(now, wanted=2)
    cluster.live(SURPLUS_S + 60)
    saved = replace(now, durables={now.active.job: durable(50, of=4)})
    assert cluster.live(20, saved) == ["machine-a"]


# ---- cut off from the store ---------------------------------------------------------------------


def test_a_member_that_reports_but_cannot_reach_the_store_is_kept():
    cut_off = state(None, node(A, absent_since=NOW - 300), node(B))
    cluster = Cluster(cut_off)
    assert cluster.live(5 * LOST_S) == []
    assert cluster.count == 2, "nothing is requested in its place"


def test_a_member_whose_lease_ended_before_this_sailord_led_is_kept():
    ids = [SavedState("a" * 8, 1).node_id(name) for name in ("machine-a", "b.example.com")]
    members = [replace(node(A), record=record(i, name=name_in(i))) for i in ids]
    before = state(None, *members, generation=generation(*ids))
    cluster = Cluster(before)
    assert cluster.live(60) == []
    new = grant_grace(replace(before, nodes=Nodes({ids[0]: members[0]})), ids)
    assert new.nodes[ids[1]].record.name != "b.example.com", "its record has gone"
    assert cluster.live(5 * LOST_S, new) == []
    assert cluster.count == 2
    assert {m.gpus for m in cluster.story.state.instances.values()} == {1}


def test_a_member_that_is_given_up_is_replaced_then_deleted():
    dead = node(A, absent_since=NOW - 60, heard_at=NOW - 60)
    now = state(None, dead, node(B), progress=Progress(40, NOW - 60))
    cluster = Cluster(now)
    assert cluster.live(60) == []
    given_up, _ = act(now, Ticked(NOW))
    assert given_up.nodes[A].is_lost
    assert cluster.live(LOST_S, given_up) == []
    assert cluster.live(20) == ["machine-a"]


def test_an_unused_node_without_a_lease_is_deleted():
    now = state(None, node(A), node(B), node(C, report(C, "idle", sealed=()), absent_since=NOW - 9))
    cluster = Cluster(state(None, node(A), node(B), node(C, report(C, "idle", sealed=()))), 3)
    cluster.live(60)
    forgotten, _ = act(now, Ticked(NOW))
    assert C not in forgotten.nodes
    assert cluster.live(LOST_S + 40, forgotten) == ["machine-c"]
