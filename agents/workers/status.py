"""The status that each worker sends, and that of a node's workers taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.core.model import GangReported
from agents.protocol.records import (
    Evaluation,
    Hang,
    NodeId,
    NodeMeasurements,
    Point,
    Sealing,
    Taking,
)

PROGRESS: tuple[Taking, ...] = ("fetching", "rebuilding", "verifying", "running", "stopped")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker's status, in full."""

    generation: int
    rank: int
    taking: Taking
    """``idle``: it has left the process groups of this generation and waits for another."""
    step: int = 0
    broken_peers: tuple[NodeId, ...] = ()
    failure: str = ""
    is_bug: bool = False
    room_needed: int = 0
    """It failed because the node's memory lacks room: bytes that must be free for snapshots."""
    room_short: int = 0
    """It delays a snapshot until that many bytes are free."""
    complete_step: int = 0
    """With ``room_short``: the last step of its generation of which it knows that all ranks have
    sealed their snapshots; 0: there is none."""
    loss: float | None = None
    tokens_per_s: float | None = None
    stall_s: float | None = None
    late_s: float | None = None
    settle_s: float | None = None
    busy_s: float | None = None
    evaluation: Evaluation | None = None
    """From rank 0: the last one."""
    earlier_evaluations: tuple[Evaluation, ...] = ()
    """From rank 0: those before it, the oldest first."""
    unlogged: str = ""
    """From rank 0: why loggers of the script are not used any more."""
    phases: tuple[tuple[str, float], ...] = ()
    meeting: str = ""
    """From rank 0: where the ranks of the generation meet, as ``HOST:PORT#SECRET``."""
    sealed_at: Point | None = None
    """The last snapshot that it sealed."""
    withdrew: bool = False
    """It removed its snapshots, since other ranks contradict their bits."""
    contradicted: tuple[NodeId, ...] = ()
    """Nodes of ranks whose bits most others contradict."""
    agreed_at: int | None = None
    """Holders of a piece have other bits: the last step after which all had the same."""
    sealing: Sealing | None = None
    """It has lost a peer, and still seals its state."""
    hang: Hang | None = None
    """It waits for another rank, longer than a step takes."""

    @property
    def complete(self) -> Point | None:
        """The last point that it knows to be complete on all ranks."""
        return Point(self.complete_step, self.generation) if self.complete_step > 0 else None


def combine(statuses: Sequence[WorkerStatus], *, at: float = 0.0) -> GangReported:
    """Combine statuses of one generation: the node is as far as its slowest worker."""
    takings = {status.taking for status in statuses}
    least: Taking = next((taking for taking in PROGRESS if taking in takings), "idle")
    return GangReported(
        at,
        statuses[0].generation,
        taking="broken" if "broken" in takings else least,
        step=min(status.step for status in statuses),
        broken_peers=tuple(sorted({peer for status in statuses for peer in status.broken_peers})),
        failure=next((f"rank {at.rank}: {at.failure}" for at in statuses if at.failure), ""),
        measured=_measured(statuses),
        sealing=sealing_of(statuses),
        hang=next((status.hang for status in statuses if status.hang is not None), None),
    )


def contradicted_of(statuses: Sequence[WorkerStatus]) -> tuple[NodeId, ...]:
    """Return the nodes whose bits the workers contradict."""
    return tuple(sorted({node for status in statuses for node in status.contradicted}))


def agreed_at(statuses: Sequence[WorkerStatus]) -> int | None:
    """Return the last step after which all holders had the same bits, if they have others now."""
    return min((each.agreed_at for each in statuses if each.agreed_at is not None), default=None)


def sealing_of(statuses: Sequence[WorkerStatus]) -> Sealing | None:
    """Return what the workers still seal; the node is ready when the slowest is."""
    sealing = [status.sealing for status in statuses if status.sealing is not None]
    if not sealing:
        return None
    return Sealing(max(each.step for each in sealing), max(each.ready_in_s for each in sealing))


def _measured(statuses: Sequence[WorkerStatus]) -> NodeMeasurements:
    """Take each figure from the slowest worker."""

    def known(name: str) -> list[float]:
        return [value for each in statuses if (value := getattr(each, name)) is not None]

    last = max(statuses, key=lambda status: (status.loss is not None, status.step))
    # Both figures come from one worker: they are parts of the same pause.
    stalls = [(status.stall_s, status.late_s) for status in statuses if status.stall_s is not None]
    stall_s, late_s = max(stalls, key=lambda pair: pair[0], default=(None, None))
    phases: dict[str, float] = {}
    for name, seconds in (phase for status in statuses for phase in status.phases):
        phases[name] = max(seconds, phases.get(name, 0.0))
    evaluated = next((each for each in statuses if each.evaluation is not None), None)
    busy = sorted((status.rank, status.busy_s) for status in statuses if status.busy_s is not None)
    return NodeMeasurements(
        loss=last.loss,
        tokens_per_s=min(known("tokens_per_s"), default=None),
        stall_s=stall_s,
        late_s=late_s,
        settle_s=max(known("settle_s"), default=None),
        phases=tuple(phases.items()),
        busy=tuple(busy),
        evaluation=None if evaluated is None else evaluated.evaluation,
        earlier_evaluations=() if evaluated is None else evaluated.earlier_evaluations,
        unlogged=next((each.unlogged for each in statuses if each.unlogged), ""),
    )
