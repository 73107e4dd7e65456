"""What the screen has to show: the last answers, the events, the losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EVENTS_KEPT = 2_000
LOSSES_KEPT = 1_024


@dataclass(eq=False)
class ScreenData:
    """Grows with each answer; views only read it."""

    status: Mapping[str, Any] | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    events: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Loss by step of the running job; thinned out if there are too many."""
    outage: str = ""
    """Why the last request was not answered; empty: it was."""
    last_event: int = 0
    hints: tuple[str, ...] = ()
    """Commands for another terminal, shown if there is room."""

    @property
    def running(self) -> Sequence[Mapping[str, Any]]:
        """The jobs that share the cluster; none if one has it alone."""
        return () if self.status is None else self.status["running"]

    @property
    def job(self) -> Mapping[str, Any] | None:
        """The active job, or the chosen one."""
        return None if self.status is None else self.status["job"]

    def take(
        self, status: Mapping[str, Any], nodes: list[dict[str, Any]], news: Iterable[Any]
    ) -> None:
        """Take the answers of one look."""
        before = self.job
        self.status, self.nodes, self.outage = status, nodes, ""
        for event in news:
            self.last_event = max(self.last_event, event["id"])
            self.events.append(event)
        job = status["job"]
        if job is None or (before is not None and before["id"] != job["id"]):
            self.losses = []
        if job is not None and job["measured"]["loss"] is not None:
            self._take_loss(job["step"], job["measured"]["loss"])

    def say(self, text: str, at: float) -> None:
        """Add a line that sailord does not know of."""
        self.events.append({"id": 0, "at": at, "kind": "said", "text": text})

    def _take_loss(self, step: int, loss: float) -> None:
        # A job that was rolled back repeats steps.
        while self.losses and self.losses[-1][0] >= step:
            self.losses.pop()
        self.losses.append((step, loss))
        if len(self.losses) > LOSSES_KEPT:
            self.losses = self.losses[::2]
