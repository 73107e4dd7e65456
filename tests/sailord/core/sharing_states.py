"""States of several jobs that share the cluster, for tests of single decisions."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import (
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    Report,
    Saving,
)
from sailord.core.model.commands import Command
from sailord.core.model.events import Elected, Event, Reported
from sailord.core.model.options import Options
from sailord.core.model.phases import Running
from sailord.core.model.state import State
from sailord.core.sharing.decide_parts import decide_parts
from sailord.core.sharing.parts import Parts
from tests.sailord.core.states import (
    JOB,
    NOW,
    TERM,
    A,
    B,
    C,
    D,
    durable,
    generation,
    record,
    report,
)

OTHER = JobId("other")
THIRD = JobId("third")
NODES = (A, B, C, D)
SHARED = Options(share=True)
SAVED = Saving("file:///kept")


def job(id_: JobId = JOB, state: str = "running", **others: object) -> JobRecord:
    made = JobRecord(id_, "queued", saving=SAVED, submitted_at=float(id_ == OTHER))
    return replace(made, state=state, **others)  # type: ignore[arg-type] # a record's fields


def elected(
    *jobs: JobRecord, options: Options = SHARED, **others: object
) -> tuple[Parts, list[Command]]:
    """A leader that has read these jobs, and four nodes."""
    event = Elected(NOW, TERM, nodes=tuple(map(record, NODES)), jobs=jobs, generations=())
    return act(Parts(State(options=options)), replace(event, **others))  # type: ignore[arg-type] # an event's fields


def act(parts: Parts, *happened: Event) -> tuple[Parts, list[Command]]:
    commands: list[Command] = []
    for event in happened:
        parts, told = decide_parts(parts, event)
        commands += told
    return parts, commands


def of_kind(kind: type, commands: list[Command]) -> list[Command]:
    return [each for each in commands if isinstance(each, kind)]


def says(
    id_: NodeId, taking: str, step: int = 0, of: int = 0, job: JobId = JOB, number: int = 1
) -> Report:
    return report(id_, taking, step=step, sealed=(), of=of, job=job, number=number)  # type: ignore[arg-type] # a word


def running() -> Parts:
    """The first job trains on all four nodes, and has a checkpoint."""
    opened = generation(*NODES)
    parts, _ = elected(job(), generations=(opened,), durables=((JOB, durable(10)),))
    reports = [says(id_, "running", 40, 3) for id_ in NODES]
    parts, _ = act(parts, Reported(NOW + 1, reports[0], tuple(reports[1:])))
    assert isinstance(parts.first.active.phase, Running)  # type: ignore[union-attr] # it is active
    return parts


def of(id_: JobId, *members: NodeId) -> GenerationRecord:
    return replace(generation(*members), job=id_)


def train(parts: Parts, id_: JobId, members: tuple[NodeId, ...], at: float) -> Parts:
    """All members say that they train, and hold steps 39 and 40."""
    reports = [report(each, "running", job=id_) for each in members]
    parts, _ = act(parts, Reported(at, reports[0], tuple(reports[1:])))
    assert isinstance(parts.of_job(id_).active.phase, Running)  # type: ignore[union-attr] # it is active
    return parts


def both_train() -> Parts:
    parts, _ = elected(
        job(),
        job(OTHER, part=(C, D)),
        generations=(of(JOB, A, B), of(OTHER, C, D)),
        durables=((JOB, durable(10)), (OTHER, durable(10))),
    )
    return train(train(parts, JOB, (A, B), NOW + 1), OTHER, (C, D), NOW + 1)


def three(sizes: tuple[int, int, int], weights: tuple[float, float, float]) -> Parts:
    """Three jobs that train, each on its number of nodes."""
    ids = tuple(NodeId(f"n{number:02}") for number in range(sum(sizes)))
    first, second, third = ids[: sizes[0]], ids[sizes[0] : -sizes[2]], ids[-sizes[2] :]
    jobs = (
        job(weight=weights[0]),
        job(OTHER, part=second, weight=weights[1]),
        job(THIRD, part=third, weight=weights[2]),
    )
    shares = ((JOB, first), (OTHER, second), (THIRD, third))
    event = Elected(
        NOW, TERM, nodes=tuple(map(record, ids)), jobs=jobs,
        generations=tuple(of(id_, *members) for id_, members in shares),
        durables=tuple((id_, durable(10)) for id_, _ in shares),
    )  # fmt: skip
    parts, _ = act(Parts(State(options=SHARED)), event)
    for id_, members in shares:
        parts = train(parts, id_, members, NOW + 1)
    return parts
