"""Single decisions about generations: stop, open, start, run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import Durable, JobId, Point, Restore
from sailord.core.decide import decide
from sailord.core.model.commands import (
    AbortGeneration,
    Command,
    Note,
    ProbeAgent,
    RequestPlan,
    Resign,
    WakeAgents,
    WriteGeneration,
)
from sailord.core.model.events import Event, GenerationWritten, Reported, Ticked, WriteRefused
from sailord.core.model.phases import Closing, Opening, Phase, Running, Starting, Waiting
from sailord.core.model.state import State
from tests.sailord.core.states import (
    BEGAN,
    G4,
    JOB,
    NOW,
    OPENING,
    STARTING,
    STOPPED,
    STOPPING,
    A,
    B,
    C,
    G,
    Planning,
    Row,
    act,
    active_of,
    node,
    opened,
    parked,
    phase,
    proposal,
    record,
    report,
    state,
)

BEGINS = report(A, step=10)
"""Running, before the first step."""

STOPS: list[Row] = [
    (
        "all members parked at one point: the next generation begins there",
        parked(41, 41),
        Ticked(NOW),
        Opening(
            replace(
                opened(restore=Restore(Point(41, 3), "memory"), members=(A,)).record, plan="plan-a"
            ),
            proposal(A),
        ),
        (
            WriteGeneration(
                replace(
                    opened(restore=Restore(Point(41, 3), "memory"), members=(A,)).record,
                    plan="plan-a",
                ),
                replaces=STOPPED,
            ),
        ),
    ),
    (
        "members parked at different steps do not count",
        parked(41, 42),
        Ticked(NOW),
        STOPPING,
        (),
    ),
    (
        "a member still runs",
        state(STOPPING, node(A, report(A, "stopped")), node(B), generation=STOPPED),
        Ticked(NOW),
        STOPPING,
        (),
    ),
    (
        "a member parked without its snapshot does not count",
        state(
            STOPPING,
            node(A, report(A, "stopped", sealed=())),
            node(B, report(B, "stopped")),
            generation=STOPPED,
        ),
        Ticked(NOW),
        STOPPING,
        (),
    ),
    (
        "a pause closes the stopped generation",
        state(
            replace(STOPPING, then="paused"),
            node(A, report(A, "stopped")),
            node(B, report(B, "stopped")),
            generation=STOPPED,
        ),
        Ticked(NOW),
        Closing("paused", "a reason"),
        (WriteGeneration(replace(STOPPED, state="closed"), replaces=STOPPED),),
    ),
    (
        "a node of the new plan can no longer be used: ask for another plan",
        state(
            replace(STOPPING, then=proposal(A, C)),
            node(A, report(A, "stopped")),
            node(B, report(B, "stopped")),
            generation=STOPPED,
        ),
        Ticked(NOW),
        Waiting("a reason; a node of the new plan can no longer be used", NOW),
        (),
    ),
]


OPENS: list[Row] = [
    (
        "a stored record aborts the last generation and wakes the next",
        state(OPENING),
        GenerationWritten(NOW, G4),
        Starting(NOW, NOW + 123, 1.0),
        (AbortGeneration(JOB, 3, (A, B)), WakeAgents((A, B))),
    ),
    (
        "another leader's record is ignored",
        state(OPENING),
        GenerationWritten(NOW, replace(G4, plan="another")),
        OPENING,
        (),
    ),
    (
        "nothing is sent before the record is stored",
        state(OPENING, node(A), node(B, lost_at=NOW)),
        Ticked(NOW),
        OPENING,
        (),
    ),
    (
        "a refused write ends leadership",
        state(OPENING),
        WriteRefused(NOW),
        None,
        (Resign("the store holds what another leader wrote"),),
    ),
]


STARTS: list[Row] = [
    (
        "all members run",
        state(STARTING, node(A, BEGINS), node(B, report(B, "verifying", step=10)), step=10),
        Reported(NOW, report(B, number=6, step=10)),
        Running(NOW),
        (),
    ),
    (
        "one member does not run yet",
        state(STARTING, node(A, BEGINS), node(B, report(B, "verifying", step=10)), step=10),
        Ticked(NOW),
        STARTING,
        (),
    ),
    (
        "one step proves that all members run, heard or not",
        state(STARTING, node(A, BEGINS), replace(node(B), report=None), step=10),
        Reported(NOW, report(A, number=6, step=11)),
        Running(NOW),
        (ProbeAgent(B),),
    ),
    (
        "a report of the generation before does not count",
        state(STARTING, node(A, BEGINS), node(B, report(B, of=2)), step=10),
        Ticked(NOW),
        STARTING,
        (),
    ),
    (
        "a notice is answered during the start",
        state(
            STARTING,
            node(A, BEGINS),
            node(B, report(B, "fetching", step=10), draining_since=NOW - 1),
            step=10,
        ),
        Ticked(NOW),
        Planning(1, (A,), "machine-b is draining", True, NOW + 60, before=STARTING),
        (RequestPlan(1, JOB, (A,), G, leaving=(B,)),),
    ),
]

RUNS: list[Row] = [
    (
        "new nodes are gathered",
        state(None, node(A), node(B), replace(node(C, report(C, "idle")), since=NOW - 29)),
        Ticked(NOW),
        Running(BEGAN),
        (),
    ),
    (
        "and then asked about, unforced",
        state(None, node(A), node(B), replace(node(C, report(C, "idle")), since=NOW - 30)),
        Ticked(NOW),
        Planning(1, (A, B, C), "machine-c could help", False, NOW + 60),
        (RequestPlan(1, JOB, (A, B, C), G),),
    ),
    (
        "a node that did not help is not asked about again",
        state(
            None,
            node(A),
            node(B),
            replace(node(C, report(C, "idle")), since=NOW - 99),
            considered=frozenset((A, B, C)),
        ),
        Ticked(NOW),
        Running(BEGAN),
        (),
    ),
    (
        "the plan is reconsidered after reconsider_s",
        state(considered_at=NOW - 600),
        Ticked(NOW),
        Planning(1, (A, B), "a better plan may exist by now", False, NOW + 60),
        (RequestPlan(1, JOB, (A, B), G),),
    ),
    (
        "nodes that joined are named by a question that was due before their own",
        state(
            None,
            node(A),
            node(B),
            replace(node(C, report(C, "idle")), since=NOW),
            considered_at=NOW - 600,
        ),
        Ticked(NOW),
        Planning(
            1, (A, B, C), "machine-c could help; a better plan may exist by now", False, NOW + 60
        ),
        (RequestPlan(1, JOB, (A, B, C), G),),
    ),
    (
        "notices are gathered",
        state(None, node(A), node(B, draining_since=NOW - 0.4)),
        Ticked(NOW),
        Running(BEGAN),
        (),
    ),
    (
        "an imminent departure shortens the gathering",
        state(
            None,
            node(A),
            node(B, draining_since=NOW - 0.1, record=record(B, leaves_at=NOW + 0.4)),
        ),
        Ticked(NOW),
        Planning(1, (A,), "machine-b is preempted", True, NOW + 60),
        (RequestPlan(1, JOB, (A,), G, leaving=(B,)),),
    ),
    (
        "a new node does not bring a draining one back",
        state(
            None,
            node(A),
            node(B, draining_since=NOW - 1),
            replace(node(C, report(C, "idle")), since=NOW - 100),
        ),
        Ticked(NOW),
        Planning(1, (A, C), "machine-b is draining", True, NOW + 60),
        (RequestPlan(1, JOB, (A, C), G, leaving=(B,)),),
    ),
]


@pytest.mark.parametrize(
    ("before", "event", "then", "orders"),
    [pytest.param(*row[1:], id=row[0]) for row in (*STOPS, *OPENS, *STARTS, *RUNS)],
)
def test_one_decision(
    before: State, event: Event, then: Phase | None, orders: tuple[Command, ...]
) -> None:
    after, commands = act(before, event)
    assert phase(after) == then
    assert commands == orders


def test_reports_about_another_job_are_ignored() -> None:
    """Each job counts its generations from one: the one before had a third one, too."""
    others = (node(each, report(each, "stopped", step=59, job=JobId("before"))) for each in (A, B))
    begun = state(STARTING, *others)
    assert phase(act(begun, Ticked(NOW + 0.1))[0]) == STARTING
    heard, _ = act(begun, Reported(NOW + 0.2, report(A, step=41, number=6)))
    assert isinstance(phase(heard), Running)


@pytest.mark.parametrize(
    ("every", "reached", "due"), [(20, None, 40), (20, 20, 40), (20, 40, None), (50, None, None)]
)
def test_a_checkpoint_that_the_job_leaves_unfinished_is_told(
    every: int, reached: int | None, due: int | None
) -> None:
    """Uploads end with their generation; the next checkpoint comes at the next multiple."""
    before = parked(41, 41)
    running = replace(active_of(before), generation=replace(STOPPED, persist_every=every))
    before = replace(before, active=running, durables={})
    if reached is not None:
        before = replace(before, durables={JOB: Durable(Point(reached, 3), "m", "sha")})
    _, commands = decide(before, Ticked(NOW))
    told = [each.text for each in commands if isinstance(each, Note) and "checkpoint" in each.text]
    expected = f"the checkpoint of step {due} was not finished before the job left its nodes"
    assert [text.partition(";")[0] for text in told] == ([] if due is None else [expected])
