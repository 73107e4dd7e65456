"""A made-up cluster that trains, and a server that shows its page as sailord would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from agents.protocol.codec import plain
from agents.protocol.records import (
    Bill,
    ComputeTimes,
    Fence,
    GenerationRecord,
    Holding,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Point,
    Report,
    Restore,
    Saving,
    Sealed,
)
from sailord.api.answers.goodput import goodput_view
from sailord.api.answers.live import DocumentCaches, JobContext, LiveContext, live_document
from sailord.api.answers.problems import Service
from sailord.api.answers.types import Refusals, StoreView
from sailord.api.handlers.live import LOOK_S
from sailord.api.handlers.page import page, page_file
from sailord.controller.step_rate import StepRate
from sailord.core.model.nodes import Exclusion, Node, Nodes
from sailord.core.model.phases import Running
from sailord.core.model.state import Active, Progress, State
from sailord.core.sharing.parts import Parts, whole
from sailord.goodput.core.ledger import Ledger, fold
from sailord.goodput.core.usage_sample import Renting, sample_usage
from sailord.notify.feed import FeedEvent
from sailord.page.merge_patch import merge_patch

JOB, STAGES, LAYERS, NOTICE_S = JobId("job"), 8, 4, 5
MICRO_BATCHES, BUSY_S = 16, 0.8
STORAGE = "file:///checkpoints"
CHECKPOINTS = {
    "checkpoints": [
        {"step": step, "generation": 1, "bytes": 3 << 30, "is_durable": step == 40,
         "is_pinned": step == 20, "role": "newest" if step == 40 else "older", "at": at}
        for step, at in ((20, None), (30, None), (40, 1e9))
    ],
    "unfinished_bytes": 1 << 20,
    "unreadable": [{"step": 10, "generation": 1, "why": "it was cut off"}],
    "trouble": "",
}  # fmt: skip
NOISE = 0.02
"""Standard deviation of a measured time."""


def live_context(ledger: Ledger, parts: tuple[State, ...] = ()) -> LiveContext:
    """What a document shows besides the controller's state, where nothing is wrong."""
    service = Service(True, StoreView(True, None), (), {}, Refusals(0, {}), None)
    return LiveContext(goodput_view(ledger), service, leader="head", at_of={}, parts=parts)


def job_context(
    plan: dict[str, Any] | None = None,
    schedule: dict[str, Any] | None = None,
    chosen: JobId | None = None,
    needed: tuple[str, ...] = (),
) -> JobContext:
    """What a document shows of one job, where nothing is wrong."""
    of_job = JobContext(plan=plan, about={}, step_rate=StepRate(), safe=None, schedule=schedule)
    return replace(of_job, needed=needed, chosen=chosen)


@dataclass(eq=False)
class MadeUp:
    """Pipelines of eight nodes that do a step a second; every 5 s one node gets a notice."""

    count: int
    gpus: int = 1
    """Of each node."""
    price: float | None = 3.0
    """Dollars an hour of each node."""
    needed: tuple[str, ...] = ()
    """Nodes that the job cannot do without."""
    begun: float = field(default_factory=time.time)
    kept: DocumentCaches = field(default_factory=DocumentCaches)
    ledger: Ledger = field(default_factory=Ledger)
    costs_s: list[float] = field(default_factory=list)
    """Processor time of each document."""
    events: tuple[FeedEvent, ...] = ()
    samples: tuple[tuple[float, int, float, float, int], ...] = ()
    """The curve: when, step, loss, tokens a second, and generation."""
    moves: tuple[dict[str, Any], ...] = ()
    role: str = "viewer"
    posted: list[dict[str, Any]] = field(default_factory=list)
    """The orders that were given."""

    def __post_init__(self) -> None:
        self._random = random.Random(7)
        self.records = [
            NodeRecord(NodeId(f"n{i:05}.1"), f"n{i:05}", f"zone-{i % 4}", "a2-highgpu-1g",
                       "A100-40", self.gpus, "h:1", "ready")
            for i in range(self.count)
        ]  # fmt: skip
        members = tuple(record.id for record in self.records)
        point = Restore(Point(0, 0), "start")
        self.generation = GenerationRecord(
            JOB, 1, "open", "sha", members, point, 1, "nothing was planned yet", step_s=1.0,
            busy=ComputeTimes((BUSY_S,) * self.count * self.gpus),
            usd_per_hour=None if self.price is None else self.price * self.count,
        )  # fmt: skip
        stages = [
            {"layers": [LAYERS * s, LAYERS * s + LAYERS], "tp": self.gpus, "gpu": "A100-40",
             "zone": "zone-0"}
            for s in range(STAGES)
        ]  # fmt: skip
        self.plan: dict[str, Any] = {
            "micro_batch_size": 1,
            "pipelines": [
                {
                    "micro_batches": MICRO_BATCHES,
                    "stages": [
                        {**stage, "node": id_, "devices": list(range(self.gpus))}
                        for stage, id_ in zip(stages, members[p : p + STAGES], strict=False)
                    ],
                }
                for p in range(0, self.count, STAGES)
            ],
        }

    def state(self) -> State:
        """The state now."""
        now = time.time()
        step, leaving = int(now - self.begun), int((now - self.begun) / NOTICE_S)
        nodes = Nodes()
        for number, record in enumerate(self.records):
            said = self._report(number, record, step)
            node = Node(record, self.begun, said, now)
            if number < leaving:
                node = replace(node, exclusion=Exclusion(draining_since=now))
            nodes[record.id] = node
        active = Active(JOB, Running(self.begun), self.generation, progress=Progress(step, now))
        jobs = {
            JOB: JobRecord(
                JOB,
                "running",
                steps=100_000,
                layers=STAGES * LAYERS,
                bill=Bill(until=self.begun),
                saving=Saving(STORAGE),
            )
        }
        return State(now=now, term=1, nodes=nodes, jobs=jobs, active=active)

    def _report(self, number: int, record: NodeRecord, step: int) -> Report:
        """What a node says: each keeps its layers, and those of the next node of its pipeline."""
        ranks = range(number * self.gpus, (number + 1) * self.gpus)
        layers = tuple(
            Holding(layer, 0, 1)
            for stage in {number % STAGES, (number + 1) % STAGES}
            for layer in range(LAYERS * stage, LAYERS * stage + LAYERS)
        )
        return Report(
            record.id, step, Fence(1, 1), 1, "running", step, job=JOB, loss=5 / (1 + step),
            busy=tuple((rank, BUSY_S * self._random.gauss(1, NOISE)) for rank in ranks),
            sealed=tuple(Sealed(Point(at, 1), layers) for at in (step, max(step - 1, 0))),
        )  # fmt: skip

    @property
    def schedule(self) -> dict[str, Any]:
        """One predicted step: all pipelines are alike."""
        first = self.plan["pipelines"][0]["stages"]
        one = 1 / (2 * MICRO_BATCHES + STAGES)
        groups = [
            {
                "stage": s, "layers": stage["layers"], "gpu": stage["gpu"], "zone": stage["zone"],
                "tp": stage["tp"], "rank": s * self.gpus, "sync": [], "update": [0.99, 1.0],
                "passes": [["F", (s + b) * one, (s + b + 1) * one, b] for b in range(MICRO_BATCHES)]
                + [["B", 1 - (s + b + 1) * one, 1 - (s + b) * one, b] for b in range(MICRO_BATCHES)]
            }
            for s, stage in enumerate(first)
        ]  # fmt: skip
        numbers = list(range(len(self.plan["pipelines"])))
        return {"iteration_s": 1.0, "shapes": 1,
                "pipelines": [{"numbers": numbers, "groups": groups}]}  # fmt: skip

    @property
    def measured(self) -> dict[str, Any] | None:
        """A step as measured: a tenth slower than predicted, and the last stage does not answer."""
        groups = [
            {"stage": g["stage"], "rank": g["rank"], "why_none": "", "update": [1.09, 1.1],
             "passes": [[kind, a * 1.1, b * 1.1, batch] for kind, a, b, batch in g["passes"]]}
            for g in self.schedule["pipelines"][0]["groups"]
        ]  # fmt: skip
        groups[-1] |= {"why_none": "its node is lost", "update": [], "passes": []}
        return {"step": 40, "age_s": 3.0, "length_s": 1.1,
                "pipelines": [{"number": 0, "groups": groups}]}  # fmt: skip

    def parts(self) -> Parts:
        """Its parts: one job has all nodes."""
        return Parts(self.state())

    def plan_of(self, job: JobId | None) -> dict[str, Any] | None:
        """The plan of the job that is shown."""
        del job
        return self.plan

    def document(self, chosen: JobId | None = None) -> dict[str, Any]:
        """The document now, about a job; its cost is noted."""
        parts = self.parts()
        state = whole(parts)
        begun = time.process_time()
        self.ledger = fold(self.ledger, sample_usage(state, lambda _: self.price, Renting()))
        about = live_context(self.ledger, tuple(parts.all()))
        of_job = job_context(self.plan_of(chosen), self.schedule, chosen, self.needed)
        found = live_document(state, self.kept, about, of_job)
        self.costs_s.append(time.process_time() - begun)
        return found


BESIDE, PAUSED = JobId("beside"), JobId("at-lunch")


class SharedMadeUp(MadeUp):
    """Beside its job another one trains on a node of its own, and a third one is paused."""

    def parts(self) -> Parts:
        """The parts of the two jobs."""
        first, id_ = self.state(), NodeId("own.1")
        record = replace(self.records[0], id=id_, name="own", gpus=1)
        said = replace(self._report(0, self.records[0], 7), node=id_, job=BESIDE)
        generation = replace(self.generation, job=BESIDE, members=(id_,))
        job = JobRecord(BESIDE, "running", steps=50_000, layers=LAYERS, part=(id_,))
        second = State(
            now=first.now,
            term=1,
            nodes=Nodes({id_: Node(record, self.begun, said, first.now)}),
            jobs={BESIDE: job},
            active=Active(BESIDE, Running(self.begun), generation, progress=Progress(7, first.now)),
        )
        paused = JobRecord(PAUSED, "paused", steps=300, reason="lunch", saving=Saving(STORAGE))
        return Parts(first.with_job(paused), {BESIDE: second})

    def plan_of(self, job: JobId | None) -> dict[str, Any] | None:
        """All layers on the one node; or the plan of the first job."""
        if job != BESIDE:
            return self.plan
        stage = {"layers": [0, LAYERS], "tp": 1, "gpu": "A100-40", "node": "own.1"}
        return {"micro_batch_size": 1, "pipelines": [{"micro_batches": 1, "stages": [stage]}]}


@contextlib.asynccontextmanager
async def serve(
    document: Callable[[JobId | None], dict[str, Any]],
    schedule: dict[str, Any] | None = None,
    measured: dict[str, Any] | None = None,
    events: Sequence[FeedEvent] = (),
    cluster: MadeUp | None = None,
) -> AsyncIterator[str]:
    """Serve the page with these documents and events, and yield its address.

    ``cluster``: whose samples and moves are shown, to whom, and what notes orders.
    """

    async def live(request: web.Request) -> web.StreamResponse:
        """Stream the document and its patches, as sailord does."""
        reply = web.StreamResponse()
        reply.content_type = "text/event-stream"
        await reply.prepare(request)
        known: dict[str, Any] = {}
        news = plain(list(events))
        chosen = request.query.get("job")
        role = "viewer" if cluster is None else cluster.role
        hello = {"cluster": "bench", "name": "", "role": role, "now": time.time()}
        await reply.write(f"event: hello\ndata: {json.dumps(hello)}\n\n".encode())
        if cluster is not None and cluster.samples:
            curve = {"job": JOB, "all": True, "rows": cluster.samples}
            await reply.write(f"event: samples\ndata: {json.dumps(curve)}\n\n".encode())
        with contextlib.suppress(ConnectionError):  # The browser was closed.
            while True:
                found = document(None if chosen is None else JobId(chosen))
                patch, known = merge_patch(known, found), found
                if patch:
                    text = json.dumps(patch, separators=(",", ":"))
                    await reply.write(f"event: patch\ndata: {text}\n\n".encode())
                if news:
                    await reply.write(f"event: events\ndata: {json.dumps(news)}\n\n".encode())
                    news = []
                await asyncio.sleep(LOOK_S)
        return reply

    async def about_job(request: web.Request) -> web.Response:
        if request.match_info["what"] == "checkpoints":
            return web.json_response(CHECKPOINTS)
        moves = () if cluster is None else cluster.moves
        about = {"moves": moves, "sha256": "sha", "timeline": schedule, "measured": measured}
        return web.json_response(about)

    async def about_node(_: web.Request) -> web.Response:
        return web.json_response({"nodes": [{"loss": {"text": "0 steps lost"}}]})

    async def order(request: web.Request) -> web.Response:
        assert cluster is not None
        cluster.posted.append({**await request.json(), "path": request.path})
        return web.json_response({}, status=202)

    app = web.Application()
    app.router.add_post("/v1/jobs/{job}/{what}", order)
    app.router.add_get("/", page)
    app.router.add_get("/page/{file}", page_file)
    app.router.add_get("/v1/live", live)
    app.router.add_get("/v1/jobs/{job}/{what}", about_job)
    app.router.add_get("/v1/nodes/{node}", about_node)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}/"
    finally:
        await runner.cleanup()
