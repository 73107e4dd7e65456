"""States of the controller, for tests of single decisions."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from agents.protocol.records import (
    Bill,
    Durable,
    Fence,
    GenerationRecord,
    Holding,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Order,
    Point,
    Report,
    Restore,
    Saving,
    Sealed,
    Taking,
    Uploaded,
)
from sailord.core import invariants
from sailord.core.decide import decide
from sailord.core.model.commands import Command, Note, WriteGeneration
from sailord.core.model.events import Event
from sailord.core.model.nodes import Node, Nodes
from sailord.core.model.phases import Opening, Phase, Running, Starting, Stopping, Waiting
from sailord.core.model.proposal import Proposal
from sailord.core.model.standing import given_up, lease_ended, probe_failed
from sailord.core.model.state import Active, OpenQuestion, Progress, State

JOB = JobId("job")
A, B, C, D = (NodeId(name) for name in "abcd")
TERM = 7
NOW = 1000.0
BEGAN = 900.0
"""When the generation began."""


def record(id_: NodeId, **others: Any) -> NodeRecord:
    """A node record that is ready for work."""
    made = NodeRecord(id_, f"machine-{id_}", "zone", "box", "A100-40", 1, f"{id_}:1", "ready")
    return replace(made, **others)


def generation(*members: NodeId, number: int = 3, **others: Any) -> GenerationRecord:
    """The third generation of the job, begun from step 10 of the second."""
    names = members or (A, B)
    made = GenerationRecord(
        JOB,
        number,
        "open",
        "plan-" + "".join(names),
        names,
        Restore(Point(10, number - 1), "memory"),
        TERM,
        "a reason",
        step_s=0.5,
        predicted_s=0.5,
        wait_s=246.0,
    )
    return replace(made, **others)


G = generation()


def report(
    id_: NodeId,
    taking: Taking = "running",
    *,
    step: int = 40,
    sealed: tuple[int, ...] = (39, 40),
    number: int = 5,
    of: int = 3,
    **others: Any,
) -> Report:
    """An agent's report about the third generation; each node has all of the one layer."""
    made = Report(
        id_,
        number,
        Fence(TERM, of),
        of if taking != "idle" else 0,
        taking,
        step,
        tuple(Sealed(Point(at, of), (Holding(0, 0, 1),)) for at in sealed),
        job=JOB,
    )
    return replace(made, **others)


def node(id_: NodeId, said: Report | None = None, **others: Any) -> Node:
    """A node as the controller knows it; it has reported that it runs."""
    return changed(Node(record(id_), BEGAN, said or report(id_), NOW - 0.5), **others)


def changed(node: Node, **others: Any) -> Node:
    """The node with other facts, in whatever group; those of its standing as they came about."""
    standing, at = node.standing, others.pop("absent_since", None)
    if at is not None:
        standing = lease_ended(standing, at)
    if others.pop("unreachable_since", None) is not None:
        standing = probe_failed(standing)
    lost_at, why = others.pop("lost_at", None), others.pop("why_lost", "")
    if lost_at is not None:
        standing = given_up(standing, lost_at, why)
    groups = {
        name: replace(
            group, **{f.name: others.pop(f.name) for f in fields(group) if f.name in others}
        )
        for name, group in (("workers", node.workers), ("exclusion", node.exclusion))
    }
    return replace(node, standing=standing, **groups, **others)


def job(**others: Any) -> JobRecord:
    """A job of one layer in one piece, without checkpoints."""
    return replace(JobRecord(JOB, "running", bill=Bill(until=NOW)), **others)


RUNNING = Running(BEGAN)


@dataclass(frozen=True)
class Planning(OpenQuestion):
    """An open question together with the phase beside which it is open."""

    before: Phase = RUNNING

    def put(self, active: Active) -> Active:
        """The job with the question open."""
        question = OpenQuestion(
            **{each.name: getattr(self, each.name) for each in fields(OpenQuestion)}
        )
        return replace(active, phase=self.before, question=question)


GROUPS = ("progress", "attempts", "asked", "checkpointing", "slowness")
NAMES = {"considered": "nodes", "considered_at": "at"}
"""Fields of ``Active.asked`` whose names say too little here."""


def grouped(active: Active, **others: Any) -> Active:
    """The job with other facts, each in the group to which it belongs."""
    for given, value in others.items():
        name = NAMES.get(given, given)
        group = next((each for each in GROUPS if hasattr(getattr(active, each), name)), None)
        changes = {name: value}
        if group is not None:
            changes = {group: replace(getattr(active, group), **changes)}
        active = replace(active, **changes)
    return active


_job = job  # ``state`` has an argument of that name.


def state(
    phase: Phase | Planning | None = None, *nodes: Node, job: JobRecord | None = None, **others: Any
) -> State:
    """A leader with one active job, whose generation runs on ``a`` and ``b`` unless said."""
    known = nodes or (node(A), node(B))
    of = job or _job()
    begun = phase if phase is not None and not isinstance(phase, Planning) else Running(BEGAN)
    active = Active(of.id, begun, G, progress=Progress(40, NOW - 0.5))
    active = phase.put(active) if isinstance(phase, Planning) else active
    active = grouped(active, considered=frozenset((A, B)), considered_at=BEGAN)
    active = grouped(active, **others)
    return State(
        now=NOW,
        term=TERM,
        leases_since=0.0,
        nodes=Nodes({each.record.id: each for each in known}),
        jobs={of.id: of},
        active=active,
    )


def proposal(*members: NodeId, **others: Any) -> Proposal:
    """A plan on these nodes that is worth it."""
    names = members or (A, B)
    made = Proposal("plan-" + "".join(names), names, True, "it pays", 0.5, 1.0)
    return replace(made, **others)


def order(kind: str, target: str = JOB, id_: str = "order", **others: Any) -> Order:
    """An order."""
    return replace(Order(id_, kind, target), **others)  # type: ignore[arg-type] # tests name kinds that there are


def durable(step: int, of: int = 3) -> Durable:
    """A committed checkpoint."""
    return Durable(Point(step, of), f"manifest-{of}-{step}", "")


def uploaded(id_: NodeId, step: int, of: int = 3, *, layer: int = 0) -> Uploaded:
    """One node's report of an uploaded layer."""
    return Uploaded(Point(step, of), f"{of}-{step}/{id_}", 1, "", (Holding(layer, 0, 1),))


KEPT = Saving("file:///checkpoints", memory_every=1, persist_every=10)


def act(before: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Decide, check the invariants, and leave notes out of the commands."""
    after, commands = decide(before, event)
    invariants.check(before, after, commands)
    return after, tuple(each for each in commands if not isinstance(each, Note))


def active_of(state: State) -> Active:
    """The active job; there must be one."""
    assert state.active is not None
    return state.active


def phase(of: State) -> Phase | Planning | None:
    """The job's phase, with the question that is open beside it."""
    if of.active is None or of.active.question is None:
        return None if of.active is None else of.active.phase
    asked = {each.name: getattr(of.active.question, each.name) for each in fields(OpenQuestion)}
    return Planning(**asked, before=of.active.phase)


WAITING = Waiting("a reason", NOW - 1)
QUESTION = Planning(4, (A, B), "a reason", True, NOW + 60)
FROM_NOTHING = replace(QUESTION, before=WAITING)
STOPPING = Stopping(proposal(A), "a reason", NOW + 20)
STOPPED = replace(G, state="stopping", stop_at=41, reason="a reason")
STARTING = Starting(NOW - 1, NOW + 30, 1.0)
G4 = replace(
    generation(number=4),
    restore=Restore(Point(40, 3), "memory"),
    lineage=(Point(10, 2),),
    fallback=Point(40, 3),
)
OPENING = Opening(G4, proposal())

Row = tuple[str, State, Event, Phase | Planning | None, tuple[Command, ...]]
"""Name, state before, event, expected phase, expected commands."""


def parked(*steps: int) -> State:
    """Both members parked at these steps, and sealed there."""
    nodes = (
        node(id_, report(id_, "stopped", step=step, sealed=(step,)))
        for id_, step in zip((A, B), steps, strict=True)
    )
    return state(STOPPING, *nodes, generation=STOPPED)


def opened(**others: object) -> WriteGeneration:
    """The write of the next generation's record, from a point that no loss takes."""
    made = replace(G4, reason="a reason", plan="plan-ab", **others)  # type: ignore[arg-type] # fields of a record
    return WriteGeneration(replace(made, fallback=made.restore.point), replaces=G)
