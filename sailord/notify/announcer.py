"""Says what happened: to the log, to whoever follows, and to the history in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import structlog

from agents.daemon.backoff import Backoff
from agents.protocol.records import JobId
from agents.store import StoreError
from sailord.cluster_records import Gateway, Transition
from sailord.core.commands import Note
from sailord.core.phases import Running
from sailord.core.reconfiguration_timing import START, ReconfigurationTiming, Reconfiguring, follow
from sailord.core.state import Active, State
from sailord.notify.feed import EventKind, Feed, Happening
from sailord.notify.outbox import Message, Outbox, committed_id

log = structlog.get_logger("sailord")

WAITING_MAX = 1_000
"""Lines of history that wait for the store; the oldest are forgotten beyond."""
PAUSE_S, PAUSE_S_MAX = 0.3, 30.0
"""Between two attempts to write a line of history."""


@dataclass(eq=False)
class Teller:
    """One sailord's voice."""

    gateway: Gateway
    feed: Feed
    outbox: Outbox
    under_way: Reconfiguring | None = None
    _lines: asyncio.Queue[tuple[JobId, Transition]] = field(
        default_factory=lambda: asyncio.Queue(WAITING_MAX)
    )

    def note(self, note: Note, state: State, cause: str, at: float) -> None:
        """Log a decision's sentence, and keep it if something changed by it."""
        active, term = state.active, state.term or 0
        about = active if active is not None and active.job == note.job else None
        generation, step = _where(about)
        log.info(note.text, job=note.job, generation=generation, step=step, term=term, cause=cause)
        id_ = self.feed.next_id(at)
        kind: EventKind = "transition" if note.is_transition else "note"
        happening = Happening(id_, at, kind, note.text, note.job, None, generation, step, term)
        self.feed.add(happening)
        if note.is_transition and note.job is not None:
            self._keep(note.job, Transition(id_, at, note.text, generation, step, term))

    def look(self, before: State, after: State) -> None:
        """Tell what outsiders wait for, from what became of the state.

        Who has just come to lead sees all of it for the first time, and so may tell it again:
        what was told before is known by its id.
        """
        self.under_way, move = follow(self.under_way, before, after)
        if move is not None and after.active is not None:
            self._tell_move(move, after.active.job, after)
        if after.term is None:
            return
        is_new_here = before.term == after.term
        for happening, id_ in _changes(before, after):
            if is_new_here:
                self.feed.add(replace(happening, id=self.feed.next_id(after.now)))
            if id_:
                shown = {f.name: getattr(happening, f.name) for f in fields(happening)}
                self.outbox.offer(Message(**shown | {"id": id_}))

    def _tell_move(self, move: ReconfigurationTiming, job: JobId, state: State) -> None:
        """Log what a move took beside what was predicted, and keep it in the history."""
        took = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in move.phases)
        text = f"generation {move.generation} trains, {_lost(move)}: {took}"
        log.info(text, job=job, generation=move.generation, phases=dict(move.phases))
        step, term = move.restored_step, state.term or 0
        id_ = self.feed.next_id(state.now)
        self.feed.add(
            Happening(id_, state.now, "note", text, job, None, move.generation, step, term)
        )
        self._keep(job, Transition(id_, state.now, text, move.generation, step, term, move))

    def _keep(self, job: JobId, line: Transition) -> None:
        if self._lines.full():
            self._lines.get_nowait()
        self._lines.put_nowait((job, line))

    async def run(self) -> None:
        """Bring lines of history into the store; while it is away they wait."""
        while True:
            job, line = await self._lines.get()
            backoff = Backoff(PAUSE_S, PAUSE_S_MAX)
            while not await self._is_written(job, line):
                await asyncio.sleep(backoff.next_s())

    async def _is_written(self, job: JobId, line: Transition) -> bool:
        try:
            await self.gateway.write_transition(job, line)
        except StoreError:
            return False
        return True


def _lost(move: ReconfigurationTiming) -> str:
    """What a move cost; before a start nothing ran that could have gone on meanwhile."""
    if move.kind == START:
        return f"{move.total_s:.2f} s after it could be planned"
    steps = "1 step" if move.steps_lost == 1 else f"{move.steps_lost} steps"
    return f"{move.downtime_s:.2f} s lost and {steps} (predicted {move.predicted_s:.2f} s)"


def _changes(before: State, after: State) -> Iterator[tuple[Happening, str]]:
    """What happened between two states, and as which message it is to be told outside.

    What is stored with its record has no id here.
    """
    for job, durable in after.durables.items():
        if before.durables.get(job) != durable:
            text = f"step {durable.point.step} is durable"
            happening = _happening("checkpoint_committed", text, after, job=job)
            yield happening, committed_id(job, durable)
    for id_ in sorted(after.nodes.notable):
        node, known = after.nodes[id_], before.nodes.get(id_)
        if node is known:
            continue
        if node.is_lost and (known is None or not known.is_lost):
            text = f"{node.record.name} is lost: {node.why_lost}"
            yield _happening("node_lost", text, after, node=node.record.name), ""
        if node.draining_since is None:
            continue
        if known is None or known.draining_since is None:
            text, when = f"{node.record.name} is going away", node.record.leaves_at
            happening = _happening("node_preempted", text, after, node=node.record.name)
            yield happening, f"{id_}.leaves" + ("" if when is None else f".{int(when)}")
    trouble = "" if after.active is None else after.active.checkpointing.trouble
    if after.active is not None and trouble:
        known_trouble = "" if before.active is None else before.active.checkpointing.trouble
        if trouble != known_trouble:
            text = f"the durable store: {trouble}"
            yield _happening("note", text, after, job=after.active.job), ""
    yield from _changes_of_job(before, after)


def _changes_of_job(before: State, after: State) -> Iterator[tuple[Happening, str]]:
    now, then = after.active, before.active
    if now is not None and now.generation is not None:
        job, number = now.job, now.generation.number
        known = then.generation.number if then is not None and then.generation else 0
        # One that was closed before a pause is taken up again with its job, and opens no more.
        if number > known and now.generation.state != "closed":
            text = f"generation {number} is open: {now.generation.reason}"
            yield _happening("generation_opened", text, after, job=job), ""
        was_running = then is not None and _runs(then) and number == known
        if _runs(now) and not was_running:
            text = f"generation {number} runs"
            happening = _happening("generation_running", text, after, job=job)
            yield happening, f"{job}.{number}.running"
    if now is not None and after.job.state == "held" and then and before.job.state != "held":
        yield _happening("job_held", after.job.reason, after, job=now.job), ""
    if then is not None and now is None:
        ended = after.jobs.get(then.job)
        if ended is not None and ended.state in {"done", "failed", "cancelled"}:
            text = f"{ended.state}: {ended.reason}"
            yield _happening("job_finished", text, after, job=ended.id), ""


def _runs(active: Active) -> bool:
    """A question about what runs already leaves it running."""
    return isinstance(active.phase, Running)


def _happening(
    kind: EventKind, text: str, state: State, *, job: str | None = None, node: str | None = None
) -> Happening:
    generation, step = _where(state.active)
    return Happening(0, state.now, kind, text, job, node, generation, step, state.term or 0)


def _where(active: Active | None) -> tuple[int, int] | tuple[None, None]:
    if active is None or active.generation is None:
        return None, None
    return active.generation.number, active.progress.step
