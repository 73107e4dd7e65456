"""Says what happened: to the log, to whoever follows, and to the history in the store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import structlog

from agents.protocol import JobId
from agents.store import StoreError
from sailord.feed import EventKind, Feed, Happening
from sailord.gateway import Gateway, Transition
from sailord.model import Active, CheckpointCommitted, Event, Note, Running, State

log = structlog.get_logger("sailord")

WAITING_MAX = 1_000
"""Lines of history that wait for the store; the oldest are forgotten beyond."""


@dataclass(eq=False)
class Teller:
    """One sailord's voice."""

    gateway: Gateway
    feed: Feed
    _lines: asyncio.Queue[tuple[int, JobId, Transition]] = field(
        default_factory=lambda: asyncio.Queue(WAITING_MAX)
    )

    def note(self, note: Note, state: State, cause: str, at: float) -> None:
        """Log a decision's sentence, and keep it if something changed by it."""
        active, term = state.active, state.term or 0
        about = active if active is not None and active.job.id == note.job else None
        generation, step = _where(about)
        log.info(note.text, job=note.job, generation=generation, step=step, term=term, cause=cause)
        id_ = self.feed.next_id(at)
        kind: EventKind = "transition" if note.is_transition else "note"
        happening = Happening(id_, at, kind, note.text, note.job, None, generation, step, term)
        self.feed.add(happening)
        if note.is_transition and note.job is not None:
            if self._lines.full():
                self._lines.get_nowait()
            line = Transition(id_, at, note.text, generation, step, term)
            self._lines.put_nowait((term, note.job, line))

    def look(self, before: State, event: Event, after: State) -> None:
        """Tell what outsiders wait for, from what became of the state."""
        if after.term is None or before.term != after.term:
            return
        if isinstance(event, CheckpointCommitted) and before.durables != after.durables:
            text = f"step {event.durable.point.step} is durable"
            self._tell("checkpoint_committed", text, after, job=event.job)
        for id_, node in after.nodes.items():
            known = before.nodes.get(id_)
            if node is known or node.leaving_since is None:
                continue
            if known is None or known.leaving_since is None:
                text = f"{node.record.name} is going away"
                self._tell("node_preempted", text, after, node=id_)
        self._look_at_job(before, after)

    def _look_at_job(self, before: State, after: State) -> None:
        now, then = after.active, before.active
        if now is not None and now.generation is not None:
            number = now.generation.number
            known = then.generation.number if then is not None and then.generation else 0
            if number > known:
                text = f"generation {number} is open: {now.generation.reason}"
                self._tell("generation_opened", text, after, job=now.job.id)
            was_running = then is not None and isinstance(then.phase, Running) and number == known
            if isinstance(now.phase, Running) and not was_running:
                text = f"generation {number} runs"
                self._tell("generation_running", text, after, job=now.job.id)
        if now is not None and now.job.state == "held" and then and then.job.state != "held":
            self._tell("job_held", now.job.reason, after, job=now.job.id)
        if then is not None and now is None:
            job = after.jobs.get(then.job.id)
            if job is not None and job.state in {"done", "failed", "cancelled"}:
                text = f"{job.state}: {job.reason}"
                self._tell("job_finished", text, after, job=job.id)

    def _tell(
        self,
        kind: EventKind,
        text: str,
        state: State,
        *,
        job: str | None = None,
        node: str | None = None,
    ) -> None:
        generation, step = _where(state.active)
        id_ = self.feed.next_id(state.now)
        happening = Happening(
            id_, state.now, kind, text, job, node, generation, step, state.term or 0
        )
        self.feed.add(happening)

    async def run(self) -> None:
        """Bring lines of history into the store; while it is away they wait."""
        while True:
            term, job, line = await self._lines.get()
            for pause_s in (0.3, 1.0, 3.0, 10.0, 30.0, 30.0):
                try:
                    await self.gateway.write_transition(job, line, term)
                    break
                except StoreError:
                    await asyncio.sleep(pause_s)


def _where(active: Active | None) -> tuple[int, int]:
    if active is None:
        return 0, 0
    generation = active.generation
    return (generation.number if generation is not None else 0), active.step
