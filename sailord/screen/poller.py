"""Asks a sailord for what the screen shows, and carries out the orders of its keys."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from sailord.client import Client, ServerProblem, part, status_path
from sailord.screen.screen_data import ScreenData
from sailord.screen.ui import Asked
from sailord.screen.view import summary

NOT_FOUND = 404
NODES_EVERY_S = 5.0
"""Seconds between two reads of all nodes while no event concerns them."""
NOTICE_S = 30.0
"""Seconds of the notice that the key gives."""


@dataclass(eq=False)
class Poller:
    """Asks a sailord, and keeps its answers."""

    client: Client
    job: str | None = None
    """The one that is shown, of several that share the cluster; ``None``: the first."""
    seen: ScreenData = field(default_factory=ScreenData)
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    _before: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By job: its step and dollars in the first answer about it."""
    _nodes_at: float = float("-inf")
    _nodes_of: Any = None

    def look(self) -> None:
        """Ask once; raises ``ServerProblem``, which the screen shows until the next answer."""
        try:
            status = self._status()
            after = f"/v1/events?follow=false&after={self.seen.last_event}"
            news = self.client.ask("GET", after)["events"]
            self.seen.take(status, self._nodes(status, bool(news)), news)
        except ServerProblem as problem:
            self.seen.outage = str(problem)
            raise
        job = status["job"]
        if job is not None:
            self._before.setdefault(job["id"], (job["step"], job["spent"]["usd"]))

    def _status(self) -> dict[str, Any]:
        """The status with the chosen job, or the first one once that does not run any more."""
        try:
            found: dict[str, Any] = self.client.ask("GET", status_path(self.job))
        except ServerProblem as problem:
            if self.job is None or problem.status != NOT_FOUND:
                raise
            self.job = None
            found = self.client.ask("GET", status_path(None))
        return found

    def _nodes(self, status: dict[str, Any], has_news: bool) -> list[dict[str, Any]]:
        """All nodes; asked for when something may have happened to one."""
        about = (status["nodes"], status["leaving"], status["unsound"])
        age_s = time.monotonic() - self._nodes_at
        if has_news or about != self._nodes_of or age_s > NODES_EVERY_S:
            found: list[dict[str, Any]] = self.client.ask("GET", "/v1/nodes")["nodes"]
            self._nodes_at, self._nodes_of = time.monotonic(), about
            return found
        return self.seen.nodes

    def order(self, asked: Asked) -> None:
        """Give an order about a node; its refusal is a line among the events.

        Or choose the next job to show.
        """
        if asked.kind == "next_job":
            self._choose_next()
            return
        body: dict[str, Any] = {"reason": "a key of sailorctl"}
        if asked.kind == "preempt":
            body["notice_s"] = NOTICE_S
        try:
            self.client.order(f"/v1/nodes/{part(asked.node)}/{asked.kind}", body)
        except ServerProblem as problem:
            self.seen.say(str(problem), time.time())

    def _choose_next(self) -> None:
        ids = [each["id"] for each in self.seen.running]
        if ids:
            shown = None if self.seen.job is None else self.seen.job["id"]
            self.job = ids[(ids.index(shown) + 1) % len(ids)] if shown in ids else ids[0]

    def summary(self) -> str:
        """Return the run in one line, from the last answers."""
        job, moves = self.seen.job, []
        if job is not None:
            with contextlib.suppress(ServerProblem):  # sailord may have ended already.
                moves = self.client.ask("GET", f"/v1/jobs/{part(job['id'])}/moves")["moves"]
        moves = [move for move in moves if move["at"] >= self.began_at]
        before = (0, 0.0) if job is None else self._before.get(job["id"], (0, 0.0))
        return summary(job, moves, time.monotonic() - self.began, before=before)
