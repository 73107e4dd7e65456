"""Single decisions about failures, deadlines, lost nodes and leadership."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import JobId, JobPast, NodeId, Point, Restore
from sailord.core.decide import decide
from sailord.core.model.commands import (
    Note,
    ProbeAgent,
    WakeAgents,
    WriteGeneration,
    WriteJob,
)
from sailord.core.model.events import (
    Deposed,
    Elected,
    Event,
    GenerationWritten,
    JobSubmitted,
    NodesObserved,
    OrderGiven,
    PlanFound,
    ProbeFailed,
    Reported,
    Ticked,
)
from sailord.core.model.phases import Closing, Held, Opening, Phase, Running, Starting, Waiting
from sailord.core.model.state import Attempts, State
from sailord.core.queries.replan_triggers import usable
from sailord.core.queries.snapshot_intervals import departures
from sailord.planning.machine_lifetimes import MachineLifetimes
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    STARTING,
    STOPPED,
    STOPPING,
    A,
    B,
    C,
    D,
    G,
    act,
    active_of,
    changed,
    generation,
    job,
    node,
    order,
    phase,
    proposal,
    record,
    report,
    state,
)

# ---- failures -------------------------------------------------------------------------------


def failing(**others: object) -> Reported:
    return Reported(NOW, report(A, "failed", number=6, failure="no memory", **others))


def test_unexplained_failure_counts_and_backs_off() -> None:
    after, commands = act(state(step=20), failing())
    assert active_of(after).phase == Waiting("machine-a failed: no memory", NOW)
    assert (active_of(after).attempts.failures, active_of(after).attempts.not_before) == (
        1,
        NOW + 1,
    )
    assert commands == ()


def test_broken_device_counts_no_failure_and_excludes_its_node() -> None:
    before = state(step=20)
    after, _ = act(before, failing(fault="device 0 is gone"))
    assert (active_of(after).attempts.failures, active_of(after).attempts.not_before) == (0, NOW)
    assert usable(after, active_of(after)) == (B,)
    mended, _ = act(after, Reported(NOW, report(A, "idle", number=7)))
    assert usable(mended, active_of(mended)) == (A, B)


def test_node_without_memory_counts_no_failure_and_is_excluded() -> None:
    after, _ = act(state(step=20, failures=2, failed_at=10), failing(unfit="no memory", step=20))
    assert active_of(after).phase == Waiting("machine-a failed: no memory", NOW)
    assert (active_of(after).attempts.failures, active_of(after).attempts.not_before) == (2, NOW)
    assert usable(after, active_of(after)) == (B,)
    room, _ = act(after, Reported(NOW, report(A, "idle", number=7)))
    assert usable(room, active_of(room)) == (A, B)


def test_job_waits_and_says_why_if_no_node_has_memory() -> None:
    small = (node(n, report(n, "idle", unfit=f"{n} is full")) for n in (A, B))
    _, commands = decide(state(Waiting("a reason", NOW - 1), *small), Ticked(NOW))
    (said,) = (each for each in commands if isinstance(each, Note))
    assert said.text == "no node is ready: machine-a: a is full; machine-b: b is full"


def test_backoff_doubles_with_each_failure() -> None:
    after, _ = act(
        state(step=20, failures=1, failed_at=10),
        Reported(NOW, report(A, "failed", step=20, number=6)),
    )
    assert (active_of(after).attempts.failures, active_of(after).attempts.not_before) == (
        2,
        NOW + 2,
    )


def test_lost_machine_counts_no_failure() -> None:
    broken = report(A, "broken", step=20, broken_peers=(B,))
    gone = node(B, unreachable_since=NOW - 1)
    after, _ = act(
        state(None, node(A), gone, failures=1, failed_at=10, step=20),
        Reported(NOW, replace(broken, number=6)),
    )
    assert isinstance(active_of(after).phase, Waiting)
    assert (active_of(after).attempts.failures, active_of(after).attempts.not_before) == (1, NOW)


def test_healthy_steps_clear_failures() -> None:
    healthy, _ = act(
        state(step=30, failures=2, failed_at=10),
        Reported(NOW, report(A, "failed", step=30, number=6)),
    )
    ill, _ = act(
        state(step=29, failures=1, failed_at=10),
        Reported(NOW, report(A, "failed", step=29, number=6)),
    )
    assert (active_of(healthy).attempts.failures, active_of(ill).attempts.failures) == (1, 2)


def test_steps_before_the_failure_do_not_count_as_healthy() -> None:
    """A step that always fails, 25 steps after the snapshot, holds the job all the same."""
    attempts = Attempts(failures=1, failed_at=35)
    before = state(step=35)
    before = replace(before, active=replace(active_of(before), attempts=attempts))
    failed = Reported(NOW, report(A, "failed", step=35, number=6))
    again, _ = act(before, failed)
    assert (active_of(again).attempts.failures, active_of(again).attempts.failed_at) == (2, 35)
    later, _ = act(before, Reported(NOW, report(A, "failed", step=55, number=6)))
    assert active_of(later).attempts.failures == 1


def test_healthy_steps_count_through_generations_that_lost_nodes_ended() -> None:
    """Each began only a few steps before its node was lost."""
    assert G.restore.point.step == 10
    before = state(step=25, failures=2, failed_at=5)
    after, _ = act(before, Reported(NOW, report(A, "failed", step=25, number=6)))
    assert active_of(after).attempts.failures == 1


def test_three_failures_hold_the_job() -> None:
    before = state(step=20, failures=2, failed_at=10)
    after, commands = act(
        before, Reported(NOW, report(A, "failed", step=20, number=6, failure="no"))
    )
    reason = "3 attempts failed; the last: machine-a failed: no"
    closed = replace(G, state="closed", reason=reason)
    assert phase(after) == Closing("held", reason)
    assert commands == (WriteGeneration(closed, replaces=G),)
    held, commands = act(after, GenerationWritten(NOW, closed))
    assert phase(held) == Held(reason, NOW)
    past = replace(job().past, held_at=NOW)
    assert commands == (WriteJob(job(state="held", reason=reason, past=past)), WakeAgents((A, B)))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (state(advanced_at=NOW - 120), Waiting("no step was done for 120 s", NOW)),
        (state(advanced_at=NOW - 119), Running(BEGAN)),
        (
            state(replace(STARTING, deadline=NOW)),
            Running(NOW),
        ),
        (
            state(
                replace(STARTING, deadline=NOW),
                node(A, report(A, "fetching", step=10)),
                node(B, report(B, step=10)),
                step=10,
            ),
            Waiting("the generation did not start in time", NOW),
        ),
        (state(STOPPING, generation=STOPPED), STOPPING),
    ],
    ids=["stuck", "slow", "started just in time", "did not start", "still stops"],
)
def test_deadlines(before: State, expected: Phase) -> None:
    after, _ = act(before, Ticked(NOW))
    assert phase(after) == expected


def test_stop_deadline_restores_from_memory() -> None:
    before = state(replace(STOPPING, deadline=NOW), generation=STOPPED)
    after, _ = act(before, Ticked(NOW))
    opening = phase(after)
    assert isinstance(opening, Opening)
    assert opening.record.restore == Restore(Point(40, 3), "memory")


# ---- loss of a node ------------------------------------------------------------------------------


def lost(after: State) -> dict[str, str]:
    """The nodes that were given up, and why."""
    return {id_: each.why_lost for id_, each in after.nodes.items() if each.is_lost}


SILENT = node(B, absent_since=NOW - 30, heard_at=NOW - 31)
SPOKE = replace(SILENT, heard_at=NOW - 1.4)
LONG = replace(SILENT, record=replace(SILENT.record, lease_s=20.0))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (state(None, node(A), SILENT, advanced_at=NOW - 7.4), {}),
        (
            state(None, node(A), SILENT, advanced_at=NOW - 7.5),
            {B: "its lease expired and no step was done since"},
        ),
        (state(None, node(A), SPOKE, advanced_at=NOW - 9), {}),
        (
            state(None, node(A), replace(SPOKE, heard_at=NOW - 1.5), advanced_at=NOW - 9),
            {B: "its lease expired and no step was done since"},
        ),
        (state(None, node(A), LONG, advanced_at=NOW - 14.9), {}),
        (
            state(None, node(A), LONG, advanced_at=NOW - 15.0),
            {B: "its lease expired and no step was done since"},
        ),
        (replace(state(None, node(A), SILENT, advanced_at=NOW - 9), leases_since=NOW - 11.9), {}),
        (replace(state(None, node(A), LONG, advanced_at=NOW - 99), leases_since=NOW - 21.9), {}),
        (
            replace(state(None, node(A), SILENT, advanced_at=NOW - 9), leases_since=NOW - 12),
            {B: "its lease expired and no step was done since"},
        ),
    ],
    ids=[
        *("steps prove that it lives", "none is done", "its own word proves it", "it says nothing"),
        *("steps of a longer lease prove it", "they are too long ago"),
        *("a new leader waits", "for the node's own lease", "for one lease"),
    ],
)
def test_expired_lease(before: State, expected: dict[str, str]) -> None:
    after, _ = act(before, Ticked(NOW))
    assert lost(after) == expected


def test_member_without_a_lease_that_answers_is_not_lost() -> None:
    before = state(None, node(A), SILENT, advanced_at=NOW - 1)
    number = 6
    for tenth in range(100):
        now = NOW + tenth / 10
        before, commands = act(before, Ticked(now))
        if ProbeAgent(B) in commands:
            number += 1
            before, _ = act(before, Reported(now, report(B, number=number)))
    assert lost(before) == {}
    assert 10 <= number - 6 <= 25, "it is asked now and then"
    after = before
    for tenth in range(1, 17):
        after, _ = act(after, Ticked(now + tenth / 10))
    assert lost(after) == {B: "its lease expired and no step was done since"}


def test_late_probe_answer_is_followed_by_more_probes() -> None:
    before, asked = state(None, node(A), SILENT, advanced_at=NOW - 1), 0
    for tenth in range(300):
        now = NOW + tenth / 10
        before, commands = act(before, Ticked(now))
        if ProbeAgent(B) in commands:
            asked += 1
            late = asked % 5 == 0
            answer = Reported(now, report(B, number=6 + asked))
            before, _ = act(before, ProbeFailed(now, B) if late else answer)
    assert lost(before) == {}


def test_few_probes_at_a_time() -> None:
    names = [NodeId(f"n{i:04}") for i in range(2000)]
    many = [replace(SILENT, record=replace(SILENT.record, id=id_, name=id_)) for id_ in names]
    before = state(None, *many, generation=generation(*names), advanced_at=NOW - 1)
    after, first = act(before, Ticked(NOW))
    after, second = act(after, Ticked(NOW + 0.1))
    after, third = act(after, Ticked(NOW + 0.2))
    asked = [order.node for order in (*first, *third) if isinstance(order, ProbeAgent)]
    assert (asked, second) == (names[:64], ()), "each has its turn"


def test_no_probe_before_a_node_can_be_lost_or_without_address() -> None:
    early = replace(state(None, node(A), SILENT, advanced_at=NOW - 9), leases_since=NOW - 9)
    nowhere = replace(SILENT, record=replace(SILENT.record, address=""))
    for before in (early, state(None, node(A), nowhere, advanced_at=NOW - 1)):
        assert act(before, Ticked(NOW))[1] == ()


def test_new_address_clears_the_last_probe() -> None:
    gone = changed(SILENT, unreachable_since=NOW - 1, probed_at=NOW - 1)
    back = replace(record(B), address="b:2")
    after, _ = act(
        state(None, node(A), gone, advanced_at=NOW - 1),
        NodesObserved(NOW, (record(A), back)),
    )
    assert (after.nodes[B].is_unreachable, after.nodes[B].probed_at) == (False, None)


def test_expired_lease_counts_sooner_before_the_first_step() -> None:
    before = state(None, node(A), SILENT, step=10, advanced_at=NOW - 1.5)
    assert lost(act(before, Ticked(NOW))[0]) == {B: "its lease expired and no step was done since"}


def test_broken_connection_plus_unanswered_probe_is_a_loss() -> None:
    broken = Reported(NOW, report(A, "broken", number=6, broken_peers=(B,)))
    asked, commands = act(state(), broken)
    assert commands == (ProbeAgent(B),)
    assert lost(asked) == {}
    again, commands = act(asked, Ticked(NOW + 0.1))
    assert commands == ()
    _, commands = act(again, Ticked(NOW + 0.2))
    assert commands == (ProbeAgent(B),)
    after, _ = act(again, ProbeFailed(NOW + 0.1, B))
    assert lost(after) == {B: "a peer lost its connection and its agent does not answer"}


def test_lost_fetch_source_need_not_be_a_member() -> None:
    asking = report(A, "broken", step=20, number=6, broken_peers=(C,))
    holder = node(C, report(C, "idle", of=3), unreachable_since=NOW - 1)
    before = state(None, node(A, broken_since=NOW - 2), node(B), holder, step=20)
    after, _ = act(before, Reported(NOW, asking))
    assert lost(after) == {C: "a peer lost its connection and its agent does not answer"}
    assert isinstance(active_of(after).phase, Waiting)
    assert active_of(after).attempts.failures == 0


def test_node_with_a_lease_is_not_lost_by_an_unanswered_probe_alone() -> None:
    after, _ = act(state(), ProbeFailed(NOW, B))
    assert lost(after) == {}


def test_broken_connection_between_live_nodes_ends_the_generation() -> None:
    before = state(
        None, node(A, report(A, "broken", broken_peers=(B,)), broken_since=NOW - 1), node(B)
    )
    after, _ = act(before, Ticked(NOW))
    assert phase(after) == Waiting("machine-a lost the connection to machine-b", NOW)
    assert lost(after) == {}


def test_one_cut_off_node_is_named_once_and_no_reporter_is_blamed() -> None:
    cut = [
        node(id_, report(id_, "broken", broken_peers=(C,)), broken_since=NOW - 1) for id_ in (A, B)
    ]
    after, _ = act(state(None, *cut, node(C)), Ticked(NOW))
    assert phase(after) == Waiting("machine-a lost the connection to machine-c", NOW)


def test_restarted_machine_is_a_new_node() -> None:
    again = record(D, name="machine-b")
    after, _ = act(state(), NodesObserved(NOW, (record(A), again)))
    assert lost(after) == {B: "its agent was restarted"}
    assert set(after.nodes) == {A, B, D}


def test_lost_node_that_reports_is_back() -> None:
    before = state(None, node(A), node(B), node(C, lost_at=NOW - 5, why_lost="silence"))
    after, _ = act(before, Reported(NOW, report(C, "idle", number=6)))
    assert not after.nodes[C].is_lost
    assert after.nodes[C].since == NOW


def test_stale_report_is_dropped() -> None:
    before = state()
    after, _ = act(before, Reported(NOW, report(A, "failed", number=5)))
    assert after.nodes[A] == before.nodes[A]


def test_agent_withdraws_its_own_notice() -> None:
    leaving = record(B, state="draining", leaves_at=NOW + 30)
    warned, _ = act(state(), NodesObserved(NOW, (record(A), leaving)))
    assert warned.nodes[B].exclusion.draining_since == NOW
    calm, _ = act(warned, NodesObserved(NOW + 0.1, (record(A), record(B))))
    assert calm.nodes[B].exclusion.draining_since is None


def test_a_started_agent_withdraws_its_stop() -> None:
    """It is `joining` until its devices are tested; the order may come before its record."""
    stopped = record(B, state="draining")
    warned, _ = act(state(), NodesObserved(NOW, (record(A), stopped)))
    early, _ = act(warned, OrderGiven(NOW + 0.1, order("withdraw", B)))
    early, _ = act(early, NodesObserved(NOW + 0.2, (record(A), stopped)))
    tests, _ = act(early, NodesObserved(NOW + 0.3, (record(A), record(B, state="joining"))))
    assert tests.nodes[B].exclusion.draining_since is None
    calm, _ = act(tests, NodesObserved(NOW + 0.4, (record(A), record(B))))
    assert calm.nodes[B].is_usable(is_member=True)


# ---- leading --------------------------------------------------------------------------------


def elected(**others: object) -> Elected:
    made = Elected(NOW, 9, nodes=(record(A), record(B)), jobs=(job(),), generations=(G,))
    return replace(made, **others)  # type: ignore[arg-type] # fields of the event


def test_new_leader_keeps_the_jobs_history() -> None:
    past = JobPast(since=BEGAN, departures=2, moved_at=BEGAN + 5)
    after, commands = act(State(), elected(jobs=(job(past=past),)))
    assert (after.job.past, commands) == (past, ())
    lost = replace(after, nodes=after.nodes.with_({B: changed(after.nodes[B], lost_at=NOW)}))
    assert departures(lost, active_of(lost)) == 3
    assert MachineLifetimes().context(after).last_move_s == BEGAN + 5


def test_new_leader_leaves_a_running_job_alone() -> None:
    after, commands = act(State(), elected())
    assert phase(after) == Starting(NOW, NOW + G.wait_s / 2, 0.0)
    assert commands == ()
    assert after.term == 9


def test_new_leader_knows_since_when_the_job_trains() -> None:
    before, other = NOW - 7200, (JobId("other"), NOW - 60)
    after, _ = act(State(), elected(trained_since=((JOB, before), other)))
    reports = [Reported(NOW + 0.1, report(id_)) for id_ in (A, B)]
    for event in reports:
        after, _ = act(after, event)
    assert phase(after) == Running(NOW + 0.1, trained_since=before)
    assert after.led_since == NOW


def test_new_leader_grants_members_without_a_lease_a_grace_period() -> None:
    after, _ = act(State(), elected(nodes=(record(A),)))
    later = tick(after, until=NOW + 11.9)
    assert lost(later) == {}
    later, _ = act(later, Ticked(NOW + 12))
    assert lost(later) == {B: "its lease expired and no step was done since"}


def test_stopped_leader_gives_up_no_node_for_its_own_silence() -> None:
    before = state(None, node(A), node(B, absent_since=NOW - 30))
    slept, _ = act(before, Ticked(NOW + 6))
    assert lost(slept) == {}
    assert lost(tick(slept, until=NOW + 17.9)) == {}
    later, _ = act(tick(slept, until=NOW + 17.9), Ticked(NOW + 18))
    assert lost(later) == {B: "its lease expired and no step was done since"}


def test_reports_from_a_short_pause_of_the_leader_are_read_first() -> None:
    before = state(None, node(A), SILENT, advanced_at=NOW - 9)
    woken, _ = act(before, Ticked(NOW + 1.3))
    assert lost(woken) == {}
    assert lost(tick(woken, until=NOW + 2.7)) == {}
    assert lost(tick(woken, until=NOW + 2.8)) == {B: "its lease expired and no step was done since"}


def tick(before: State, *, until: float) -> State:
    """Let time pass in ticks, as for a leader that is not stopped."""
    while before.now < until:
        before, _ = act(before, Ticked(min(before.now + 0.5, until)))
    return before


def test_new_leader_keeps_nothing_from_before() -> None:
    after, _ = act(state(failures=4), elected(jobs=()))
    assert after.active is None
    assert after.nodes[A].report is None


def test_deposed_leader_forgets_everything() -> None:
    after, commands = act(state(), Deposed(NOW))
    assert (after.term, after.active, after.nodes, commands) == (None, None, {}, ())


@pytest.mark.parametrize(
    "event",
    [
        Ticked(NOW),
        NodesObserved(NOW, (record(A),)),
        Reported(NOW, report(A)),
        JobSubmitted(NOW, job(state="queued")),
        OrderGiven(NOW, order("cancel")),
        PlanFound(NOW, 1, proposal()),
    ],
    ids=lambda event: type(event).__name__,
)
def test_follower_learns_and_commands_nothing(event: Event) -> None:
    assert act(State(now=NOW), event) == (State(now=NOW), ())


def test_time_never_goes_back() -> None:
    after, _ = act(state(), Ticked(NOW - 500))
    assert after.now == NOW
