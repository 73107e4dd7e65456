"""Single decisions about questions to the planner and their answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import JobPast
from sailord.core.model.commands import Command, ProbeAgent, RequestPlan, WriteGeneration, WriteJob
from sailord.core.model.events import Event, OrderGiven, PlanFound, PlanRefused, Ticked
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Opening, Phase, Running, Stopping, Waiting
from sailord.core.model.state import State
from sailord.core.queries.replan_triggers import RECONSIDERED
from tests.sailord.core.states import (
    BEGAN,
    FROM_NOTHING,
    JOB,
    NOW,
    OPENING,
    QUESTION,
    STARTING,
    STOPPED,
    WAITING,
    A,
    B,
    C,
    D,
    G,
    Planning,
    Row,
    act,
    active_of,
    changed,
    generation,
    job,
    node,
    opened,
    order,
    phase,
    proposal,
    record,
    report,
    state,
)

GABC = generation(A, B, C)

WAITS: list[Row] = [
    (
        "other failures are gathered first",
        state(replace(WAITING, since=NOW - 0.05)),
        Ticked(NOW),
        replace(WAITING, since=NOW - 0.05),
        (),
    ),
    (
        "then the planner is asked; the last plan may be repeated",
        state(WAITING),
        Ticked(NOW),
        Planning(1, (A, B), "a reason", True, NOW + 60, before=WAITING),
        (RequestPlan(1, JOB, (A, B), G, is_urgent=True, repeats=True),),
    ),
    (
        "after one failure too",
        state(WAITING, failures=1),
        Ticked(NOW),
        Planning(1, (A, B), "a reason", True, NOW + 60, before=WAITING),
        (RequestPlan(1, JOB, (A, B), G, is_urgent=True, repeats=True),),
    ),
    (
        "a plan that failed twice in a row is not repeated",
        state(WAITING, failures=2),
        Ticked(NOW),
        Planning(1, (A, B), "a reason", True, NOW + 60, before=WAITING),
        (RequestPlan(1, JOB, (A, B), G, is_urgent=True),),
    ),
    (
        "after a pause the plan is not repeated",
        state(replace(WAITING, since=NOW - 5), generation=replace(G, state="closed")),
        Ticked(NOW),
        Planning(1, (A, B), "a reason", True, NOW + 60, before=replace(WAITING, since=NOW - 5)),
        (RequestPlan(1, JOB, (A, B), replace(G, state="closed"), is_urgent=True),),
    ),
    (
        "the backoff after a failure is kept",
        state(WAITING, not_before=NOW + 1),
        Ticked(NOW),
        WAITING,
        (),
    ),
    (
        "a refused question is not repeated",
        state(WAITING, is_refused=True, considered_at=NOW - 599),
        Ticked(NOW),
        WAITING,
        (),
    ),
    (
        "unless reconsider_s has passed",
        state(WAITING, is_refused=True, considered_at=NOW - 600),
        Ticked(NOW),
        Planning(1, (A, B), "a reason", True, NOW + 60, before=WAITING),
        (RequestPlan(1, JOB, (A, B), G, is_urgent=True),),
    ),
    (
        "or there is another node",
        state(WAITING, node(A), node(B), node(C), is_refused=True),
        Ticked(NOW),
        Planning(1, (A, B, C), "a reason", True, NOW + 60, before=WAITING),
        (RequestPlan(1, JOB, (A, B, C), G, is_urgent=True),),
    ),
    (
        "no question without usable nodes",
        state(WAITING, node(A, absent_since=NOW - 1, heard_at=NOW)),
        Ticked(NOW),
        WAITING,
        (),
    ),
    (
        "draining, cordoned, unready and lost nodes are left out",
        state(
            WAITING,
            node(A),
            node(B, draining_since=NOW - 1),
            node(C, is_cordoned=True),
            node(D, record=record(D, state="joining")),
        ),
        Ticked(NOW),
        Planning(1, (A,), "a reason", True, NOW + 60, before=WAITING),
        (RequestPlan(1, JOB, (A,), G, is_urgent=True),),
    ),
]


PLANS: list[Row] = [
    (
        "nothing runs: the plan is opened at once from memory",
        state(FROM_NOTHING),
        PlanFound(NOW, 4, proposal()),
        replace(OPENING, record=opened().record),
        (opened(),),
    ),
    (
        "an answer to an older question is ignored",
        state(QUESTION),
        PlanFound(NOW, 3, proposal(A)),
        QUESTION,
        (),
    ),
    (
        "no plan: the running generation goes on",
        state(QUESTION),
        PlanRefused(NOW, 4, "nothing fits"),
        Running(BEGAN),
        (),
    ),
    (
        "no answer: the running generation goes on",
        state(replace(QUESTION, deadline=NOW)),
        Ticked(NOW),
        Running(BEGAN),
        (),
    ),
    (
        "the answer is waited for up to the deadline",
        state(QUESTION),
        Ticked(NOW),
        QUESTION,
        (),
    ),
    (
        "a node of the question is lost: ask again",
        state(replace(FROM_NOTHING, nodes=(A, B, C)), node(A), node(B), node(C, lost_at=NOW)),
        PlanFound(NOW, 4, proposal(A, B, C)),
        Planning(1, (A, B), "a reason", True, NOW + 60, before=WAITING),
        (RequestPlan(1, JOB, (A, B), G, is_urgent=True, repeats=True),),
    ),
    (
        "a better plan that does not pay is not adopted",
        state(replace(QUESTION, is_forced=False)),
        PlanFound(NOW, 4, proposal(A, is_worth_it=False)),
        Running(BEGAN),
        (),
    ),
    (
        "a forced change is adopted at any cost",
        state(QUESTION),
        PlanFound(NOW, 4, proposal(A, is_worth_it=False)),
        Stopping(proposal(A, is_worth_it=False), "a reason", NOW + 61.5),
        (WriteGeneration(STOPPED, replaces=G),),
    ),
    (
        "the running plan is kept",
        state(QUESTION),
        PlanFound(NOW, 4, proposal()),
        Running(BEGAN),
        (),
    ),
    (
        "no stop if a member leaves before a step ends",
        state(
            replace(QUESTION, nodes=(A,)),
            node(A),
            node(B, draining_since=NOW - 1, record=record(B, leaves_at=NOW + 0.7)),
            considered=frozenset((A,)),
        ),
        PlanFound(NOW, 4, proposal(A)),
        Opening(replace(opened().record, plan="plan-a", members=(A,)), proposal(A)),
        (
            WriteJob(job(past=JobPast(departures=1))),
            WriteGeneration(
                replace(opened().record, plan="plan-a", members=(A,)),
                replaces=G,
            ),
        ),
    ),
    (
        "a stop if a member leaves after some more steps",
        state(
            replace(QUESTION, nodes=(A,)),
            node(A),
            node(B, draining_since=NOW - 1, record=record(B, leaves_at=NOW + 0.8)),
        ),
        PlanFound(NOW, 4, proposal(A)),
        Stopping(proposal(A), "a reason", NOW + 61.5),
        (WriteGeneration(STOPPED, replaces=G),),
    ),
    (
        "a stop if the measured steps are shorter than those of the next plan",
        state(
            replace(QUESTION, nodes=(A,)),
            node(A),
            node(B, draining_since=NOW - 1, record=record(B, leaves_at=NOW + 0.7)),
            step_s=0.4,
        ),
        PlanFound(NOW, 4, proposal(A)),
        Stopping(proposal(A), "a reason", NOW + 61.5),
        (WriteGeneration(STOPPED, replaces=G),),
    ),
    (
        "unheard snapshot holders are waited for",
        state(FROM_NOTHING, node(A), replace(node(B), report=None)),
        PlanFound(NOW, 4, proposal()),
        replace(FROM_NOTHING, answer=proposal()),
        (ProbeAgent(B),),
    ),
]


@pytest.mark.parametrize(
    ("before", "event", "then", "orders"),
    [pytest.param(*row[1:], id=row[0]) for row in (*WAITS, *PLANS)],
)
def test_one_decision(
    before: State, event: Event, then: Phase | None, orders: tuple[Command, ...]
) -> None:
    after, commands = act(before, event)
    assert phase(after) == then
    assert commands == orders


def test_nodes_left_out_of_a_repeated_plan_are_asked_about_later():
    before = state(WAITING, node(A), node(B), node(C))
    after, (asked,) = act(before, Ticked(NOW))
    assert isinstance(asked, RequestPlan)
    assert (asked.nodes, asked.repeats) == ((A, B, C), True)
    assert active_of(after).asked.nodes == frozenset((A, B))


def test_planner_without_answer_is_asked_again_after_a_pause():
    refused = PlanRefused(NOW, 4, "its process died", is_known=False)
    after, _ = act(state(FROM_NOTHING), refused)
    assert isinstance(phase(after), Waiting)
    pause_s = after.options.failure_pause_s
    waits, commands = act(after, Ticked(NOW + pause_s / 2))
    assert commands == ()
    _, (asked,) = act(waits, Ticked(NOW + pause_s))
    assert isinstance(asked, RequestPlan)


@pytest.mark.parametrize("is_late", [False, True], ids=["failed", "late"])
def test_questions_without_an_answer_are_counted_until_there_is_one(is_late: bool):
    known = state(FROM_NOTHING)
    for count in (1, 2):
        question = active_of(known).question
        assert question is not None
        none = PlanRefused(known.now, question.request, "its process died", is_known=False)
        known, _ = act(known, Ticked(question.deadline) if is_late else none)
        assert active_of(known).unanswered == count
        known, _ = act(known, Ticked(known.now + known.options.failure_pause_s))
    question = active_of(known).question
    assert question is not None
    refused, _ = act(known, PlanRefused(known.now, question.request, "nothing fits"))
    assert active_of(refused).unanswered == 0


def _last_resort(*draining: Node) -> State:
    """The job waits, there was no plan, and the question with those that leave is open."""
    before = state(WAITING, *draining, generation=GABC, is_refused=True, considered=frozenset())
    after, (asked,) = act(before, Ticked(NOW))
    assert isinstance(asked, RequestPlan)
    assert asked.nodes == (A, B)
    return after


def test_last_resort_that_lost_a_node_before_the_answer_is_asked_without_it():
    gone = node(C, lost_at=NOW - 2)
    a, b = (node(id_, draining_since=NOW - 10) for id_ in (A, B))
    asked = _last_resort(a, b, gone)
    lost = changed(asked.nodes[B], lost_at=NOW)
    _, (again,) = act(replace(asked, nodes=asked.nodes.with_({B: lost})), Ticked(NOW + 1))
    assert isinstance(again, RequestPlan)
    assert again.nodes == (A,)


def test_last_resort_without_answer_is_asked_again_but_a_refused_one_is_not():
    gone = node(C, lost_at=NOW - 2)
    a, b = (node(id_, draining_since=NOW - 10) for id_ in (A, B))
    asked = _last_resort(a, b, gone)
    question = active_of(asked).question
    assert question is not None
    late, _ = act(asked, PlanRefused(NOW + 1, question.request, "it died", is_known=False))
    pause_s = late.options.failure_pause_s
    _, (again,) = act(late, Ticked(NOW + 1 + pause_s))
    assert isinstance(again, RequestPlan)
    assert again.nodes == (A, B)
    refused, _ = act(asked, PlanRefused(NOW + 1, question.request, "nothing fits"))
    assert act(refused, Ticked(NOW + 1 + pause_s))[1] == ()


def test_plan_that_leaves_new_nodes_out_is_reconsidered_soon():
    soon = proposal(ask_again_s=30.0)
    after, _ = act(state(FROM_NOTHING), PlanFound(NOW, 4, soon))
    assert active_of(after).asked.at + after.options.reconsider_s == NOW + 30.0


@pytest.mark.parametrize(("is_forced", "moved_at"), [(True, None), (False, NOW)])
def test_only_voluntary_reconfiguration_starts_a_cooldown(is_forced, moved_at) -> None:
    nodes = (node(A), node(B), node(C))
    question = replace(QUESTION, nodes=(A, B, C), is_forced=is_forced)
    after, commands = act(state(question, *nodes), PlanFound(NOW, 4, proposal(A, B, C)))
    assert isinstance(phase(after), Stopping)
    written = [each.job.past.moved_at for each in commands if isinstance(each, WriteJob)]
    assert written == ([] if moved_at is None else [moved_at])


@pytest.mark.parametrize(("has_joined", "becomes"), [(True, Stopping), (False, Opening)])
def test_generation_that_a_member_has_yet_to_join_is_not_stopped_but_left(
    has_joined: bool, becomes: type[Phase]
) -> None:
    """An agent joins open generations only, so the others would wait for it until ``stop_s``."""
    said = report(B, "fetching" if has_joined else "idle", step=10, sealed=())
    here = node(A, report(A, "fetching", step=10, sealed=()))
    asked = replace(QUESTION, nodes=(A,), before=STARTING)
    before = state(asked, here, node(B, said, draining_since=NOW - 1), step=10)
    after, _ = act(before, PlanFound(NOW, QUESTION.request, proposal(A)))
    assert isinstance(phase(after), becomes)


def test_cordoned_member_that_must_go_is_planned_around_without_waiting_for_the_answer():
    """The question leaves it out already, so that none of its nodes is affected."""
    nodes = (node(A), node(B, is_cordoned=True), node(C))
    asked = replace(QUESTION, nodes=(A, C), is_forced=False)
    before = state(asked, *nodes, generation=GABC, considered=frozenset((A, B, C)))
    warned, commands = act(before, OrderGiven(NOW + 1, order("preempt", B, leaves_at=NOW + 30)))
    assert commands == (), "further notices are gathered"
    after, (request,) = act(warned, Ticked(NOW + 2))
    assert isinstance(request, RequestPlan)
    assert request.nodes == (A, C)
    at = phase(after)
    assert isinstance(at, Planning)
    assert (at.reason, at.is_forced) == ("machine-b is preempted", True)


def _spares(question: Planning) -> State:
    """The job runs on two of four nodes, and a question is open."""
    idle = [node(id_, report(id_, "idle", of=0, sealed=())) for id_ in (C, D)]
    return state(question, node(A), node(B), *idle, considered=frozenset(question.nodes))


def test_new_node_is_asked_about_again_without_one_that_went_before_the_answer():
    asked = replace(QUESTION, nodes=(A, B, C, D), is_forced=False)
    after, (request,) = act(_spares(asked), OrderGiven(NOW, order("drain", C)))
    assert isinstance(request, RequestPlan)
    assert request.nodes == (A, B, D)
    at = phase(after)
    assert isinstance(at, Planning)
    assert (at.reason, at.is_forced) == ("machine-d could help", False)


@pytest.mark.parametrize("cordoned", [(), (B,)])
def test_ordered_plan_is_asked_for_again_without_a_node_that_went_before_the_answer(
    cordoned: tuple[str, ...],
) -> None:
    # The ordered plan may be one of several reasons, and not be named.
    asked = replace(QUESTION, nodes=(A, B, C, D), is_forced=not cordoned, is_ordered=True)
    before = _spares(asked)
    nodes = {id_: changed(before.nodes[id_], is_cordoned=id_ in cordoned) for id_ in (A, B)}
    before = replace(before, nodes=before.nodes.with_(nodes))
    after, (request,) = act(before, OrderGiven(NOW, order("drain", C)))
    assert isinstance(request, RequestPlan)
    assert request.nodes == ((A, D) if cordoned else (A, B, D))
    at = phase(after)
    assert isinstance(at, Planning)
    assert (at.reason, at.is_forced) == ("a new plan was ordered", not cordoned)


def test_plan_that_was_ordered_beside_an_older_notice_is_asked_for_again():
    """The notice was due first and is the only reason; the question settled the order, too."""
    before = _spares(QUESTION)
    before = replace(before, active=replace(active_of(before), question=None))
    after, _ = act(before, OrderGiven(NOW, order("drain", B, "one")))
    after, (_, request) = act(after, OrderGiven(NOW + 5, order("replan", id_="two")))
    assert isinstance(request, RequestPlan)
    assert request.nodes == (A, C, D)
    asked = phase(after)
    assert isinstance(asked, Planning)
    assert (asked.reason, asked.is_ordered) == ("machine-b is draining", True)
    after, _ = act(after, OrderGiven(NOW + 6, order("withdraw", B, "three")))
    after, (request,) = act(after, OrderGiven(NOW + 7, order("drain", C, "four")))
    assert isinstance(request, RequestPlan)
    assert request.nodes == (A, B, D)
    asked = phase(after)
    assert isinstance(asked, Planning)
    assert (asked.reason, asked.is_ordered) == ("a new plan was ordered", True)


def test_ordered_plan_is_part_of_the_answer_to_a_member_that_drains():
    """Other notices are gathered first; the plan that follows is a new one anyway."""
    asked = replace(QUESTION, nodes=(A, B, C, D), is_ordered=True)
    after, commands = act(_spares(asked), OrderGiven(NOW, order("drain", B)))
    assert (phase(after), commands) == (Running(BEGAN), ())
    after, (request,) = act(after, Ticked(NOW + 1))
    assert isinstance(request, RequestPlan)
    assert request.nodes == (A, C, D)


def test_a_move_to_a_better_plan_says_that_it_was_found() -> None:
    asked = Planning(4, (A, B), RECONSIDERED, False, NOW + 60)
    after, _ = act(state(asked), PlanFound(NOW, 4, proposal(A)))
    moved = active_of(after).phase
    assert isinstance(moved, Stopping)
    assert moved.reason == "a better plan was found: it pays"
