"""Handler of ``/v1/live``, the page's stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agents.protocol.codec import plain
from agents.protocol.records import JobId
from sailord.api.access.callers import STILL_ADMITTED, caller_of, name_of
from sailord.api.access.load_limits import LOAD
from sailord.api.answers.goodput import goodput_view
from sailord.api.answers.live import DocumentCaches, JobContext, LiveContext, cluster_part, job_part
from sailord.api.answers.losses import needed_nodes
from sailord.api.answers.responses import too_many
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.api.handlers.plans import plan_of
from sailord.api.handlers.problems import service_of
from sailord.core.model.state import State
from sailord.notify.feed import FeedEvent
from sailord.page.merge_patch import merge_patch
from sailord.page.training_curve import CurvePoint, TrainingCurve
from worker.version import own_version

LOOK_S = 0.5
"""How often changes are sent to watchers."""
SHARE_MAX = 0.1
"""Largest share of the time spent on making the document; in a large cluster it is made less
often."""
QUIET_S = 5.0
"""How often a stream without changes sends a comment, so that the page knows that it is alive."""
SHARES_SHOWN = 14
"""Days of the goodput, and jobs."""
EVENTS_FIRST = 100


@dataclass(eq=False)
class LiveDocuments:
    """The present documents, made for all watchers at once: one for each job that is watched."""

    kept: DocumentCaches = field(default_factory=DocumentCaches)
    took_s: float = 0.0
    """What the present ones took to make, together."""
    _made_at: float = float("-inf")
    _state: State = field(default_factory=State)
    _about: LiveContext | None = None
    _cluster: dict[str, Any] = field(default_factory=dict)
    """What is the same in all of them."""
    _documents: dict[JobId | None, dict[str, Any]] = field(default_factory=dict)
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self, api: ApiContext, chosen: JobId | None) -> dict[str, Any]:
        """Return the document that shows a job, rebuilt if it is older than ``LOOK_S``.

        ``None``: the first job that runs.
        """
        async with self._making:
            due_s = max(LOOK_S, self.took_s / SHARE_MAX) * 0.9
            if self._about is None or time.monotonic() >= self._made_at + due_s:
                begun = time.monotonic()
                self._state, self._about = api.cluster.last_led, _surroundings(api)
                made = cluster_part(self._state, self.kept, self._about)
                self._cluster = {**made, "leads": api.cluster.state.term is not None}
                self._documents, self._made_at = {}, time.monotonic()
                self.took_s = self._made_at - begun
            if chosen not in self._documents:
                of_job = await _about_job(api, self._state, self._about.parts, chosen)
                begun = time.monotonic()
                made = job_part(self._state, self.kept, self._about, of_job)
                self._documents[chosen] = {**self._cluster, **made}
                self.took_s += time.monotonic() - begun
            return self._documents[chosen]


LIVE = web.AppKey("live", LiveDocuments)


def _surroundings(api: ApiContext) -> LiveContext:
    return LiveContext(
        goodput=goodput_view(api.goodput.ledger, api.goodput.shares, most=SHARES_SHOWN),
        service=service_of(api),
        leader="" if api.cluster.leader is None else api.cluster.leader.host,
        at_of=api.cluster.outbox.at_of,
        parts=api.cluster.led_parts,
        first_seen=api.first_seen,
    )


async def _about_job(
    api: ApiContext, state: State, parts: Sequence[State], chosen: JobId | None
) -> JobContext:
    """What is shown of a job; of the first one, for the problems, if the chosen one rests."""
    runs = [part for part in parts if part.active is not None and part.active.job == chosen]
    part, job = (runs[0], chosen) if runs else (state, None)
    plan, about = await plan_of(api, part)
    run = None if part.active is None else part.active.generation
    return JobContext(
        plan=plan,
        about=about,
        step_rate=api.cluster.step_rate_of(job),
        safe=api.cluster.safe_point(job),
        schedule=None if run is None else api.timelines_seen.get((run.job, run.plan)),
        risks=api.cluster.risks(part),
        needed=needed_nodes(part, api.cluster.following),
        chosen=chosen,
    )


async def live(request: web.Request) -> web.StreamResponse:
    """Stream what the page shows: a document and its patches, samples of training, and events."""
    api, shared = request.app[CONTEXT], request.app[LIVE]
    caller = caller_of(request)
    reply = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
    reply.content_type = "text/event-stream"
    hello = {
        "cluster": api.config.cluster_name,
        "name": "" if caller is None else caller.name,
        "role": "viewer" if caller is None else caller.role,
        "version": own_version(),
        "now": api.clock.now(),
    }
    chosen = JobId(request.query["job"]) if request.query.get("job") else None
    stream = _Stream(api, reply, chosen)
    load, name = request.app[LOAD], name_of(request)
    if not load.may_stream(name):
        raise too_many("event streams")
    with load.streaming(name):
        try:
            await reply.prepare(request)
            await stream.send("hello", hello)
            while api.may_stream_on(stream.term) and request[STILL_ADMITTED]():
                await stream.tell(await shared.look(api, chosen))
                await asyncio.sleep(LOOK_S)
        except ConnectionError:
            pass  # The client has disconnected.
    return reply  # Another sailord leads now: the page reconnects to it.


def lasting(events: Sequence[FeedEvent]) -> list[FeedEvent]:
    """Return the events without those that the next one of their job replaces.

    These are parts of a reconfiguration, checkpoints, and repetitions: a job's end is told by two
    events, one of which is a transition. The page does the same with the events that follow.
    """
    found: list[FeedEvent] = []
    after: dict[str | None, FeedEvent] = {}
    for each in reversed(events):
        said = after.get(each.job)
        is_passing = each.is_detail or each.kind == "checkpoint_committed"
        is_repeated = (
            said is not None and each.job is not None and _bare_text(said) == _bare_text(each)
        )
        if said is None or not (is_passing or is_repeated):
            found.append(each)
            after[each.job] = each
    return found[::-1]


def _bare_text(event: FeedEvent) -> str:
    return event.text.removeprefix("held: ")


@dataclass(eq=False)
class _Stream:
    """One watcher's stream, and what it was sent."""

    api: ApiContext
    reply: web.StreamResponse
    chosen: JobId | None = None
    term: int | None = field(init=False)
    known: dict[str, Any] = field(default_factory=dict)
    event_id: int = 0
    curve: tuple[TrainingCurve | None, int, int] = (None, 0, 0)
    """The curve that was sent, its version, and how many of its samples."""
    sent_at: float = 0.0

    def __post_init__(self) -> None:
        self.term = self.api.cluster.state.term
        kept = lasting(self._select_events(self.api.cluster.feed.kept))
        if len(kept) > EVENTS_FIRST:
            self.event_id = kept[-EVENTS_FIRST - 1].id

    def _select_events(self, events: Iterable[FeedEvent]) -> list[FeedEvent]:
        """Return the events of the chosen job and of nodes; all if none was chosen."""
        mine = (None, self.chosen)
        return [
            each
            for each in events
            if self.chosen is None or each.job in mine or each.kind == "node_lost"
        ]

    async def send(self, kind: str, value: object) -> None:
        """Send one event."""
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        await self.reply.write(f"event: {kind}\ndata: {text}\n\n".encode())
        self.sent_at = time.monotonic()

    async def tell(self, document: dict[str, Any]) -> None:
        """Send what is new."""
        patch = merge_patch(self.known, document)
        self.known = document
        if patch:
            await self.send("patch", patch)
        await self._samples()
        news = lasting(self._select_events(self.api.cluster.feed.after(self.event_id)))
        if news:
            self.event_id = news[-1].id
            await self.send("events", plain(news))
        if time.monotonic() >= self.sent_at + QUIET_S:
            await self.reply.write(b": nothing new\n\n")
            self.sent_at = time.monotonic()

    async def _samples(self) -> None:
        shown = self.known.get("job")
        curve = self.api.curves.of(self.chosen if shown is None else shown["id"])
        known, version, count = self.curve
        is_whole = curve is not known or curve.version != version
        fresh: Sequence[CurvePoint] = curve.samples if is_whole else curve.samples[count:]
        self.curve = curve, curve.version, len(curve.samples)
        if fresh or is_whole:
            rows = [[s.at, s.step, s.loss, s.per_s, s.generation] for s in fresh]
            await self.send("samples", {"job": curve.job, "all": is_whole, "rows": rows})
