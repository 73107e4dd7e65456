"""Timing of reconfigurations by phase, beside the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import (
    Durable,
    Fence,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Order,
    Point,
    Report,
    Restore,
)
from sailord.core.model.nodes import Node, Nodes
from sailord.core.model.phases import Opening, Running, Starting, Stopping, Waiting
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import Active, Progress, State
from sailord.core.queries.reconfiguration_timing import follow
from sailord.text.causes import short_cause
from tests.sailord.core.states import Planning, changed, grouped

JOB = JobRecord(JobId("j"), "running")
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def record(number, members, step, source="memory"):
    restore = Restore(Point(step, number - 1), source)
    lineage = () if number == 1 else (Point(0, number - 1),)
    about = "open", "p", members, restore, 1, f"why {number}", lineage
    return GenerationRecord(JOB.id, number, *about)


OLD, NEW = record(1, (A, B), 0), record(2, (A, B), 100)
PREDICTED = (("quiesce", 0.5), ("fetch", 2.0))
PLAN = Proposal("p", (A, B), True, "why", 1.0, move_s=2.5, move_phases=PREDICTED)


def node(id_, **facts):
    return changed(Node(NodeRecord(id_, id_, "z", "m", "g", 1, id_, "ready"), 0.0), **facts)


class Film:
    """States one after the other, and what comes of watching them."""

    def __init__(self):
        self.nodes, self.marks = {A: node(A), B: node(B)}, {}
        self.active = Active(JOB, Running(0.0), OLD, progress=Progress(101, 10.0, 0.5))
        self.state = self._state(10.0)
        self.under_way, self.moves = None, []

    def _state(self, now):
        nodes = Nodes(self.nodes)
        return State(term=1, now=now, nodes=nodes, active=self.active, marks=self.marks)

    def at(self, now, phase=None, **facts):
        self.active = grouped(self.active, **facts)
        if isinstance(phase, Planning):
            self.active = phase.put(self.active)
        elif phase is not None:
            self.active = replace(self.active, phase=phase, question=None)
        before, self.state = self.state, self._state(now)
        self.under_way, move = follow(self.under_way, before, self.state)
        if move is not None:
            self.moves.append(move)

    def plan(self, asked, answered, before=None):
        planning = Planning(1, (A, B), "why", True, 99.0, before=before or Waiting("w", asked))
        self.at(asked, planning)
        self.at(answered, replace(planning, answer=PLAN))

    def run(self, opened, written, running, stepped, *, of=NEW):
        self.at(opened, Opening(of, PLAN))
        self.at(written, generation=of, step=of.restore.point.step, advanced_at=written)
        self.at(written, Starting(written, 99.0, 2.5))
        phases = {A: (("fetch", 0.2), ("rebuild", 0.5)), B: (("fetch", 0.3), ("first_step", 0.9))}
        for id_, told in phases.items():
            report = Report(id_, 1, Fence(1, 2), of.number, "running", 100, phases=told)
            self.nodes = {**self.nodes, id_: replace(self.nodes[id_], report=report)}
        self.at(running, Running(running), advanced_at=running)
        self.at(stepped, step=of.restore.point.step + 1, advanced_at=stepped)


def test_timing_of_a_loss_by_phase():
    film = Film()
    film.nodes[B] = node(B, heard_at=11.0, absent_since=11.0, lost_at=12.0)
    film.plan(12.25, 12.5)
    film.run(12.5, 12.75, 14.0, 15.0)
    (move,) = film.moves
    assert (move.kind, move.generation, move.reason) == ("loss", 2, "why 2")
    assert (move.steps_lost, move.restored_step, move.is_planned) == (1, 100, False)
    assert dict(move.phases) == {
        "detect": 1.25, "plan": 0.25, "quiesce": 0.25,
        "fetch": 0.3, "rebuild": 0.5, "first_step": 0.9,
    }  # fmt: skip
    assert move.total_s == 4.0
    assert move.downtime_s == pytest.approx(15.0 - 10.0 - 0.5)
    assert move.predicted_s == 2.5
    assert move.predicted == PREDICTED
    assert dict(PREDICTED).keys() <= dict(move.phases).keys()


@pytest.mark.parametrize(("heard_at", "since"), [(10.75, 10.75), (3.0, 10.0), (11.5, 11.0)])
def test_a_loss_counts_from_the_last_sign_of_life(heard_at: float, since: float):
    """A report, or the last step; at the latest the end of the lease."""
    film = Film()
    film.nodes[B] = node(B, heard_at=heard_at, absent_since=11.0, lost_at=12.0)
    film.plan(12.25, 12.5)
    film.run(12.5, 12.75, 14.0, 15.0)
    (move,) = film.moves
    assert (move.at, dict(move.phases)["detect"]) == (since, 12.25 - since)
    assert move.total_s == 15.0 - since


def test_a_move_costs_its_downtime_and_the_steps_that_are_done_again():
    film = Film()
    film.nodes[B] = node(B, heard_at=11.0, absent_since=11.0, lost_at=12.0)
    film.plan(12.25, 12.5)
    film.run(12.5, 12.75, 14.0, 15.0, of=replace(NEW, usd_per_hour=720.0))
    (move,) = film.moves
    assert (move.downtime_s, move.steps_lost) == (4.5, 1)
    assert move.usd == pytest.approx((4.5 + 0.5) * 720.0 / 3600)


def waits_for_nodes(film, asked, refused):
    film.at(asked, Planning(1, (A,), "why", True, 99.0, before=Waiting("w", asked)))
    film.at(refused, Waiting("w", asked), is_refused=True)


def test_time_without_enough_nodes_is_no_time_of_the_planner():
    film = Film()
    film.nodes[B] = node(B, heard_at=11.0, absent_since=11.0, lost_at=12.0)
    waits_for_nodes(film, 12.25, 12.5)
    film.at(600.0)
    film.at(700.0, is_refused=False)
    film.plan(700.0, 700.25)
    film.run(700.5, 700.75, 701.0, 702.0)
    (move,) = film.moves
    assert (move.kind, dict(move.phases)["no_plan"]) == ("loss", 687.5)
    assert (dict(move.phases)["detect"], dict(move.phases)["plan"]) == (1.25, 0.5)


def test_time_without_any_node_is_no_detection():
    """The planner is not even asked then."""
    film = Film()
    film.nodes[B] = node(B, heard_at=11.0, absent_since=11.0, lost_at=12.0)
    film.at(12.25, Waiting("b is lost", 12.0), is_refused=True)
    film.at(612.25, is_refused=False)
    film.plan(612.25, 612.5)
    film.run(612.5, 612.75, 613.0, 614.0)
    (move,) = film.moves
    phases = dict(move.phases)
    assert (phases["detect"], phases["no_plan"], phases["plan"]) == (1.25, 600.0, 0.25)


def test_rollback_that_was_ordered_while_a_job_waited_is_the_cause():
    film = Film()
    film.nodes[B] = node(B, heard_at=11.0, absent_since=11.0, lost_at=12.0)
    waits_for_nodes(film, 12.25, 12.5)
    ordered = Order("o", "rollback", JOB.id, durable=Durable(Point(20, 1), "m", ""))
    film.at(600.0, orders=(ordered,))
    film.at(700.0, is_refused=False)
    film.plan(700.0, 700.25)
    film.run(700.25, 700.75, 701.0, 702.0, of=record(2, (A, B), 20, "durable"))
    (move,) = film.moves
    assert (move.kind, move.steps_lost, move.orders) == ("order", 81, ("o",))


def test_job_is_timed_from_its_own_turn():
    """The one before it waited, was cancelled, and gave it the cluster in one decision."""
    film = Film()
    film.at(10.0, Waiting("too few", 10.0), generation=None)
    waits_for_nodes(film, 11.0, 11.5)
    film.at(70.0, Waiting("next in the queue", 70.0), job=JobId("second"), is_refused=False)
    film.plan(71.0, 71.5, Waiting("next in the queue", 70.0))
    film.run(71.5, 72.0, 73.0, 74.0, of=record(1, (A, B), 0))
    (move,) = film.moves
    assert (move.kind, move.at, move.total_s) == ("start", 70.0, 4.0)
    assert "no_plan" not in dict(move.phases)


def test_planned_reconfiguration_loses_no_step_and_starts_at_the_stop():
    film = Film()
    film.nodes[B] = node(B, draining_since=10.5)
    film.plan(11.0, 11.5, Running(0.0))
    film.at(11.5, Stopping(PLAN, "why", 99.0))
    film.at(12.0, step=100, advanced_at=12.0)
    film.run(12.25, 12.5, 13.0, 13.5)
    (move,) = film.moves
    assert (move.kind, move.is_planned, move.steps_lost) == ("notice", True, 0)
    assert move.downtime_s == pytest.approx(13.5 - 12.0 - 0.5)
    assert dict(move.phases)["quiesce"] == 1.0


@pytest.mark.parametrize(
    ("members", "carried_out"), [((A, B), ()), ((A,), ("drain-b", "end-b"))], ids=["stays", "left"]
)
def test_a_move_carries_out_the_orders_of_the_nodes_that_it_leaves(members, carried_out):
    film = Film()
    given = (("drain-b", "drain"), ("end-b", "preempt"), ("cordon-b", "cordon"))
    film.marks = {
        A: (Order("drain-a", "drain", A),),
        B: tuple(Order(id_, kind, B) for id_, kind in given),
    }
    film.plan(11.0, 11.5, Running(0.0))
    film.at(11.5, Stopping(PLAN, "why", 99.0))
    film.run(12.25, 12.5, 13.0, 13.5, of=record(2, members, 100))
    (move,) = film.moves
    assert move.orders == carried_out


def test_generation_that_never_ran_counts_as_a_retry():
    film = Film()
    film.nodes[B] = node(B, heard_at=12.0, lost_at=12.0)
    film.plan(12.0, 12.5)
    film.at(12.5, Opening(NEW, PLAN))
    film.at(13.0, Starting(13.0, 99.0, 2.5), generation=NEW, step=100, advanced_at=13.0)
    film.at(14.0, Waiting("it failed", 14.0))
    film.plan(15.0, 15.5)
    film.run(15.5, 16.0, 17.0, 18.0, of=record(3, (A, B), 90))
    (move,) = film.moves
    assert dict(move.phases)["retries"] == 3.0
    assert dict(move.phases)["detect"] == 0.0
    assert move.steps_lost == 11


def test_all_losses_of_one_reconfiguration_are_its_reason():
    film = Film()
    film.nodes[B] = node(B, heard_at=12.0, lost_at=12.0)
    film.plan(12.0, 12.5)
    lost = replace(NEW, reason="b is lost: no lease")
    film.at(12.5, Opening(lost, PLAN))
    film.at(13.0, Starting(13.0, 99.0, 2.5), generation=lost, step=100, advanced_at=13.0)
    film.at(14.0, Waiting("c is lost: no lease", 14.0))
    film.plan(15.0, 15.5)
    why = "c is lost: no lease; b is lost: no lease"
    film.run(15.5, 16.0, 17.0, 18.0, of=replace(record(3, (A, B), 90), reason=why))
    (move,) = film.moves
    assert short_cause(move.reason) == "b, c lost"
    assert move.downtime_s == pytest.approx(18.0 - 10.0 - 0.5)


def test_question_that_changes_nothing_is_not_timed():
    film = Film()
    film.plan(11.0, 11.5, Running(0.0))
    film.at(11.5, Running(0.0))
    film.at(12.0, step=102)
    assert film.moves == []
    assert film.under_way is None


def test_unreported_phase_is_left_out():
    film = Film()
    film.plan(11.0, 11.0)
    film.at(11.0, Opening(NEW, PLAN))
    film.at(12.0, Starting(12.0, 99.0, 2.5), generation=NEW, step=100)
    film.at(13.0, Running(13.0))
    film.at(14.0, step=101, advanced_at=14.0)
    assert set(dict(film.moves[0].phases)) == {"detect", "plan", "quiesce"}


@pytest.mark.parametrize("before", [None, replace(OLD, state="closed")])
def test_start_loses_no_steps(before):
    film = Film()
    film.at(10.0, Waiting("next in the queue", 10.0), generation=before, advanced_at=2.0, step=0)
    film.plan(11.0, 11.5, Waiting("next in the queue", 10.0))
    film.run(11.5, 12.0, 13.0, 14.0, of=record(1 if before is None else 2, (A, B), 0))
    (move,) = film.moves
    assert (move.kind, move.steps_lost, move.downtime_s, move.usd) == ("start", 0, 0.0, None)
    assert move.total_s == 4.0


def test_new_node_is_of_kind_addition():
    film = Film()
    film.nodes[C] = node(C)
    film.at(11.0, Planning(1, (A, B, C), "c could help", False, 99.0, before=Running(0.0)))
    assert film.under_way.kind == "addition"


def asked_for_c(film, at, began=0.0):
    film.at(at, Planning(1, (A, B, C), "c could help", False, 999.0, before=Running(began)))
    return film.under_way


def test_returned_node_is_seen_since_its_return():
    film = Film()
    film.nodes[C] = node(C, returned_at=105.0)
    assert asked_for_c(film, 135.0).sign_at == 105.0


def test_node_that_came_during_a_reconfiguration_is_seen_after_it():
    film = Film()
    film.nodes[C] = node(C)
    assert asked_for_c(film, 135.0, began=110.0).sign_at == 110.0


def test_node_that_was_asked_about_before_is_no_addition():
    """It was too early to move for it: the wait is the policy's, and detects nothing."""
    film = Film()
    film.nodes[C] = node(C)
    film.at(40.0, considered=frozenset({A, B, C}))
    seen = asked_for_c(film, 600.0)
    assert (seen.kind, seen.sign_at) == ("reconsidered", 600.0)


def test_question_before_the_first_step_does_not_end_the_timing():
    film = Film()
    film.plan(11.0, 11.5)
    film.at(11.5, Opening(NEW, PLAN))
    film.at(12.0, Starting(12.0, 99.0, 2.5), generation=NEW, step=100, advanced_at=12.0)
    film.at(13.0, Running(13.0), advanced_at=13.0)
    film.at(13.5, Planning(2, (A, B, C), "c could help", False, 99.0, before=Running(13.0)))
    film.at(14.0, step=101, advanced_at=14.0)
    (move,) = film.moves
    assert (move.generation, move.total_s) == (2, 3.0)


def test_reconfiguration_before_the_first_step_counts_once():
    film = Film()
    film.plan(11.0, 11.5)
    film.at(11.5, Opening(NEW, PLAN))
    film.at(12.0, Starting(12.0, 99.0, 2.5), generation=NEW, step=100, advanced_at=12.0)
    film.plan(13.0, 13.5, Starting(12.0, 99.0, 2.5))
    film.run(13.5, 14.0, 15.0, 16.0, of=record(3, (A, B), 100))
    (move,) = film.moves
    assert (move.generation, move.total_s, dict(move.phases)["retries"]) == (3, 5.0, 2.5)
