"""The state after the last decision, and what is observed besides it, for all to read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from agents.protocol.records import JobId, Leader
from planner.replan.past_moves import RECENT, PastMove
from sailord.controller.lost_nodes import LostNodes
from sailord.controller.step_rate import StepRate
from sailord.controller.store_health import StoreHealth
from sailord.core.model.state import State
from sailord.core.queries.forecast import seconds_left
from sailord.core.queries.reconfiguration_timing import ReconfigurationTiming
from sailord.core.sharing.parts import Parts, whole
from sailord.planning.machine_lifetimes import MachineLifetimes
from sailord.planning.messages import MoveContext


@dataclass(eq=False)
class ClusterState:
    """What this sailord knows of the cluster.

    The event loop replaces ``parts`` at each decision; the daemon and the store writer update
    ``store``, and the daemon ``leader``.
    """

    parts: Parts
    state: State = field(init=False)
    """All nodes and jobs, with the first part's active job: see ``whole``."""
    last_led: State = field(init=False)
    """The last state in which this sailord was the leader; what the API shows."""
    last_parts: Parts = field(init=False)
    """The parts of that state."""
    store: StoreHealth = field(default_factory=StoreHealth)
    store_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have the store read at once."""
    leader: Leader | None = None
    """The present leader, as last read; ``None``: none is elected."""
    step_rate: StepRate = field(default_factory=StepRate)
    """The measured speed of the active job."""
    step_rates: dict[JobId, StepRate] = field(default_factory=dict)
    """The measured speeds of the jobs beside it."""
    lifetimes: MachineLifetimes = field(default_factory=MachineLifetimes)
    lost_nodes: LostNodes = field(default_factory=LostNodes)
    watchers: list[Callable[[State], None]] = field(default_factory=list)
    """Called with the state after each decision."""
    _moves: deque[PastMove] = field(default_factory=lambda: deque(maxlen=2 * RECENT))

    def __post_init__(self) -> None:
        self.state = self.last_led = whole(self.parts)
        self.last_parts = self.parts

    def advance(self, parts: Parts) -> None:
        """Take over the parts after a decision."""
        self.parts = parts
        self.state = state = whole(parts)
        if state.term is not None:
            self.last_led, self.last_parts = state, parts
        self.step_rate.observe(state)
        self.step_rates = {id_: self.step_rates.get(id_, StepRate()) for id_ in parts.others}
        for id_, rate in self.step_rates.items():
            rate.observe(parts.others[id_])
        self.lifetimes.observe(state)
        self.lost_nodes.observe(state)
        for watch in self.watchers:
            watch(state)

    @property
    def term(self) -> int | None:
        """Our term as leader; ``None`` while we are not."""
        return self.state.term

    def step_rate_of(self, job: JobId | None) -> StepRate:
        """The measured speed of a job; that of the active one for all that have no other."""
        return self.step_rate if job is None else self.step_rates.get(job, self.step_rate)

    @property
    def move_context(self) -> MoveContext:
        """What the planner needs to judge a reconfiguration of the first part's job now."""
        return self.move_context_of(None)

    def move_context_of(self, job: JobId | None) -> MoveContext:
        """What the planner needs to judge a reconfiguration of the job now."""
        part = self.parts.of_job(job)
        known = self.lifetimes.context(part)
        return replace(known, left_s=seconds_left(part), moves=tuple(self._moves))

    def relearn_moves(self, moves: Iterable[ReconfigurationTiming]) -> None:
        """Replace the known moves by those that earlier leaders measured."""
        self._moves.clear()
        self.learn_moves(moves)

    def learn_moves(self, moves: Iterable[ReconfigurationTiming]) -> None:
        """Remember measured moves, to predict the next ones."""
        for move in moves:
            if move.uncorrected and "retries" not in dict(move.phases):
                self._moves.append(PastMove(move.is_planned, move.uncorrected, move.phases))

    @property
    def is_store_available(self) -> bool:
        return self.store.is_available

    def log_fields(self) -> dict[str, object]:
        """Fields of every log line: job, generation, term and step."""
        term, active = self.state.term, self.state.active
        if active is None:
            return {"term": term}
        number = None if active.generation is None else active.generation.number
        return {"job": active.job, "generation": number, "term": term, "step": active.progress.step}
