"""Properties of every decision, under any events in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from agents.protocol.records import (
    Bill,
    GenerationRecord,
    Holding,
    JobId,
    NodeId,
    OrderKind,
    Point,
    Report,
    Sealed,
    Taking,
)
from sailord.core import invariants
from sailord.core.decide import decide
from sailord.core.model.commands import (
    Command,
    CommitCheckpoint,
    ProbeAgent,
    RequestPlan,
    SettleOrder,
    WriteGeneration,
    WriteJob,
)
from sailord.core.model.events import (
    CheckpointCommitted,
    CommitFailed,
    DurableChecked,
    Elected,
    Event,
    GenerationWritten,
    JobSubmitted,
    JobWriteRejected,
    ManifestWritten,
    NodesObserved,
    OrderGiven,
    PlanFound,
    PlanRefused,
    ProbeFailed,
    Reported,
    StoreReturned,
    Ticked,
)
from sailord.core.model.nodes import Nodes
from sailord.core.model.phases import Closing, Held, Opening, Running, Starting, Stopping
from sailord.core.model.state import State
from tests.sailord.core.states import (
    JOB,
    KEPT,
    A,
    B,
    C,
    durable,
    job,
    order,
    proposal,
    record,
    report,
    uploaded,
)

NAMES = (A, B, C)
ROUNDS_MAX = 700
"""The slowest case: a job is paused while its last step cannot be made durable."""
OTHER = JobId("other")

names = st.sampled_from(NAMES)
some_names = st.lists(names, unique=True, max_size=3).map(lambda each: tuple(sorted(each)))
seconds = st.sampled_from((0.0, 0.1, 0.6, 1.0, 3.0, 15.0, 40.0, 130.0))
takings = st.sampled_from(("running", "running", "stopped", "broken", "failed", "fetching", "idle"))
OF_NODES = ("drain", "withdraw", "cordon", "uncordon", "preempt")
orders = st.sampled_from(
    ("pause", "resume", "replan", "cancel", "checkpoint", "rollback", *OF_NODES)
)
progress = st.tuples(st.just("progress"))
faults = st.one_of(
    st.tuples(st.just("tick"), seconds),
    st.tuples(st.just("nodes"), some_names),
    st.tuples(st.just("report"), names, takings, st.integers(0, 3), some_names),
    st.tuples(st.just("all run"), st.integers(1, 30)),
    st.tuples(st.just("all stop"), st.integers(0, 1)),
    st.tuples(st.just("probe failed"), names),
    st.tuples(st.just("order"), orders, names),
    st.tuples(st.just("plan"), some_names),
    st.tuples(st.just("written")),
    st.tuples(st.just("commit"), st.booleans()),
    st.tuples(st.just("check"), st.booleans()),
    st.tuples(st.just("store returned")),
)


History = list[tuple[object, ...]]
"""Actions, see ``Cluster.events``."""


class Cluster:
    """A controller, and as much of a cluster as its commands need."""

    def __init__(self, usd_max: float | None = None) -> None:
        self.state = State()
        self.now = 0.0
        self.numbers = dict.fromkeys(NAMES, 0)
        self.step = 0
        self.orders = 0
        self.commands: list[Command] = []
        first = job(state="queued", saving=KEPT, bill=Bill(until=0.0, usd_max=usd_max))
        jobs = (first, job(id=OTHER, state="queued", priority=-1))
        self.feed(Elected(0.0, 7, nodes=tuple(map(record, NAMES)), jobs=jobs, generations=()))

    def feed(self, event: Event) -> tuple[Command, ...]:
        before = self.state
        self.state, commands = decide(before, event)
        invariants.check(before, self.state, commands)
        self.commands += commands
        return commands

    def live_through(self, history: History) -> None:
        """Feed the events of each action."""
        for action in history:
            for event in self.events(action):
                self.feed(event)

    @property
    def generation(self) -> GenerationRecord | None:
        active = self.state.active
        return None if active is None else active.generation

    def last(self, kind: type[Command]) -> Command | None:
        return next((each for each in reversed(self.commands) if isinstance(each, kind)), None)

    def events(self, action: tuple[object, ...]) -> list[Event]:
        """Return an action's events in the current state; none if it does not apply."""
        self.now += 0.01
        match action:
            case ("progress",):
                return self._next_expected()
            case ("tick", float() as waited):
                self.now += waited
                return [Ticked(self.now)]
            case ("nodes", tuple() as there):
                return [NodesObserved(self.now, tuple(record(id_) for id_ in there))]
            case ("report", str() as id_, str() as taking, int() as steps, tuple() as broken_peers):
                return [self._report(NodeId(id_), cast("Taking", taking), steps, broken_peers)]
            case ("all run", int() as steps):
                return self._reports("running", steps)
            case ("all stop", int() as steps):
                return self._reports("stopped", steps)
            case ("probe failed", str() as id_):
                return [ProbeFailed(self.now, NodeId(id_))]
            case ("order", str() as kind, str() as id_):
                self.orders += 1
                target = id_ if kind in OF_NODES else JOB
                given = order(cast("OrderKind", kind), target, f"order-{self.orders}")
                if kind == "rollback":
                    kept = self.state.durables.get(JOB)
                    if kept is None:
                        return []
                    given = replace(given, durable=kept)
                return [OrderGiven(self.now, given)]
            case ("plan", ()):
                asked = self.state.requests
                return [PlanRefused(self.now, asked, "nothing fits", is_unpaid=asked % 2 == 0)]
            case ("plan", tuple() as members):
                found = proposal(*members)
                return [PlanFound(self.now, self.state.requests, found)]
            case ("written",):
                write = self.last(WriteGeneration)
                is_new = isinstance(write, WriteGeneration)
                return [GenerationWritten(self.now, write.record)] if is_new else []
            case ("commit", bool() as is_fine):
                return self._commit_outcome(is_fine=is_fine)
            case ("check", bool() as is_fine):
                return self._check_outcome(is_fine=is_fine)
            case ("rejected",):
                return [JobWriteRejected(self.now, JOB, "a transaction of 2000000 bytes")]
            case ("store returned",):
                return [StoreReturned(self.now)]
            case _:
                raise AssertionError(f"unknown action {action}")

    def unused(self) -> list[NodeId]:
        """Return the nodes outside the current generation."""
        active = self.state.active
        if active is None or not isinstance(active.phase, Starting | Running | Stopping):
            return list(NAMES)
        members = () if self.generation is None else self.generation.members
        return [id_ for id_ in NAMES if id_ not in members]

    def _next_expected(self) -> list[Event]:
        """Return the next events if nothing fails."""
        active = self.state.active
        if active is not None and active.question is not None:
            found = proposal(*active.question.nodes, usd_per_hour=360.0)
            return [PlanFound(self.now, active.question.request, found)]
        match None if active is None else active.phase:
            case Starting() | Running():
                return self._reports("running", 5)
            case Stopping() if self.generation is not None and self.generation.stop_at is not None:
                return self._reports("stopped", max(self.generation.stop_at - self.step, 0))
            case Opening() | Stopping() | Closing():
                return self.events(("written",))
            case _:
                self.now += 1.5
                return [Ticked(self.now)]

    def _reports(self, taking: Taking, steps: int) -> list[Event]:
        members = () if self.generation is None else self.generation.members
        self.step += steps
        return [self._report(id_, taking, 0, ()) for id_ in members]

    def _report(
        self, id_: NodeId, taking: Taking, steps: int, broken_peers: tuple[NodeId, ...]
    ) -> Event:
        self.numbers[id_] += 1
        self.step += steps
        number = 0 if self.generation is None else self.generation.number
        point = Point(self.step, number)
        sealed = (Sealed(point, (Holding(0, 0, 1),)),)
        votes = (uploaded(A, self.step, number),) if id_ == A else ()
        made: Report = report(
            id_,
            taking,
            step=self.step,
            number=self.numbers[id_],
            of=number,
            broken_peers=broken_peers if taking == "broken" else (),
            contradicted=broken_peers if taking == "failed" else (),
            agreed_at=self.step // 2 if taking == "failed" and broken_peers else None,
            uploaded=votes,
        )
        return Reported(self.now, replace(made, sealed=sealed))

    def _commit_outcome(self, *, is_fine: bool) -> list[Event]:
        """Return the next event of a commit: its manifest, or the outcome of the transaction."""
        active = self.state.active
        if active is None or active.checkpointing.commit is None:
            return []
        point, written = active.checkpointing.commit.point, active.checkpointing.commit.durable
        if not is_fine:
            return [CommitFailed(self.now, active.job, point, "it is away")]
        if written is None:
            made = durable(point.step, point.generation)
            return [ManifestWritten(self.now, active.job, made)]
        return [CheckpointCommitted(self.now, active.job, written)]

    def _check_outcome(self, *, is_fine: bool) -> list[Event]:
        """Return the answer to the open question for a readable checkpoint."""
        active = self.state.active
        check = None if active is None else active.checkpointing.check
        if active is None or check is None or check.found or check.why_none:
            return []
        of = check.of.point
        found = durable(
            of.step if check.step_max is None else min(of.step, check.step_max), of.generation
        )
        answer = DurableChecked(self.now, active.job, check.of, found, step_max=check.step_max)
        if not is_fine:
            answer = replace(answer, found=None, why="it is away", is_away=True)
        return [answer]


histories = st.lists(progress | faults, min_size=10, max_size=60)
rejections = st.tuples(st.just("rejected"))
with_rejections = st.lists(progress | faults | rejections, min_size=10, max_size=60)


@given(with_rejections)
def test_any_events_keep_the_invariants_and_decide_the_same(
    history: History,
) -> None:
    one, other = Cluster(), Cluster()
    one.live_through(history)
    other.live_through(history)
    assert one.state == other.state
    assert one.commands == other.commands


@given(with_rejections, st.sampled_from((None, 0.3, 5.0)))
def test_job_goes_on_once_faults_end(history: History, usd_max: float | None) -> None:
    """Or it is held and says why, or was paused or cancelled."""
    cluster = Cluster(usd_max)
    cluster.live_through(history)
    cluster.live_through(
        [("order", kind, id_) for kind in ("withdraw", "uncordon") for id_ in NAMES]
    )
    for _ in range(ROUNDS_MAX):
        if is_settled(cluster.state):
            return
        cluster.now += 1.2
        calm = [
            *cluster.events(("nodes", NAMES)),
            *cluster.events(("commit", True)),
            *cluster.events(("check", True)),
            *cluster._next_expected(),
        ]
        for event in (*calm, *(cluster._report(id_, "idle", 0, ()) for id_ in cluster.unused())):
            cluster.feed(event)
    raise AssertionError(f"the job did not settle: {cluster.state.active}")


def is_settled(state: State) -> bool:
    if state.active is None:
        return all(each.state != "queued" for each in state.jobs.values())
    is_resting = isinstance(state.active.phase, Running | Held) and state.active.question is None
    return is_resting and not state.active.orders


@given(histories)
def test_repeated_event_changes_nothing(history: History) -> None:
    cluster = Cluster()
    for action in history:
        for event in cluster.events(action):
            cluster.feed(event)
            cluster.feed(Ticked(cluster.now))  # Forgets nodes that nothing names any more.
            once = cluster.state
            assert cluster.feed(event) == (), event
            assert cluster.state == once, event


@given(histories)
def test_no_command_is_repeated(history: History) -> None:
    cluster = Cluster()
    cluster.live_through(history)
    writes = [each.record for each in cluster.commands if isinstance(each, WriteGeneration)]
    asked = [each.request for each in cluster.commands if isinstance(each, RequestPlan)]
    settled = [each.id for each in cluster.commands if isinstance(each, SettleOrder)]
    assert len(set(writes)) == len(writes)
    assert asked == sorted(set(asked))
    assert len(set(settled)) == len(settled)
    last: dict[JobId, WriteJob] = {}
    for each in cluster.commands:
        if isinstance(each, WriteJob):
            assert last.get(each.job.id) != each
            last[each.job.id] = each
    steps = [
        each.durable.point.step for each in cluster.commands if isinstance(each, CommitCheckpoint)
    ]
    assert steps == sorted(steps)


@given(histories, st.permutations(NAMES), st.sampled_from(("running", "stopped", "fetching")))
def test_simultaneous_reports_commute(
    history: History, other_order: list[NodeId], taking: Taking
) -> None:
    cluster = Cluster()
    cluster.live_through(history)
    events = {id_: cluster._report(id_, taking, 0, ()) for id_ in NAMES}
    submitted = JobSubmitted(cluster.now, job(id=JobId("third"), state="queued"))
    outcomes = []
    for chosen in (NAMES, other_order):
        state, decided = cluster.state, []
        for event in (*(events[id_] for id_ in chosen), submitted):
            state, commands = decide(state, event)
            decided += commands
        state, commands = decide(state, Ticked(cluster.now))
        # The node that reports last may be probed just before.
        told = [each for each in (*decided, *commands) if not isinstance(each, ProbeAgent)]
        outcomes.append((_known(state), Counter(map(type, told))))
    assert outcomes[0] == outcomes[1]


def _known(state: State) -> State:
    """Return the state without the order of nodes in the mapping and the times of probes."""
    nodes = {id_: replace(node, probed_at=None) for id_, node in sorted(state.nodes.items())}
    return replace(state, nodes=Nodes(nodes))
