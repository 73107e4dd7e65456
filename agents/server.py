"""The agent's HTTP server, for sailord, other agents and their workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiohttp import web

from agents.core.model import AbortReceived, Event, State
from agents.daemon.clock import Clock
from agents.daemon.exposition import CONTENT_TYPE
from agents.daemon.unreadable import UnreadableRecords
from agents.links.http import LinkRoutes
from agents.metrics import metrics_text
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.names import JOB_ID_PATTERN
from agents.protocol.records import Abort, JobId, KnownGeneration
from agents.rpc.identity import CallerRole
from agents.rpc.listener import Listener
from agents.rpc.server import Handler, answer_signed, refuse_stranger
from agents.rpc.signing import Verifier
from agents.rpc.strangers import AUTHENTICATED, StrangerLimits, charge
from agents.rpc.tls import Tls
from agents.rpc.unsigned_bodies import UNSIGNED
from agents.snapshots.checkpoint_http import CheckpointRoutes
from agents.snapshots.http import SnapshotRoutes
from agents.work.package import Package, read_part
from agents.work.preparation import Preparation
from agents.workers.kept_steps import read_kept_steps
from agents.workers.logs import MARK, read_ended, read_output
from agents.workers.rendezvous import Rendezvous

BODY_BYTES_MAX = 1 << 16
FOR_AGENTS = ("/v1/meeting/", "/v1/packages/", "/v1/links/listen")
"""What other agents may ask, too; the rest is for sailord alone."""


@dataclass(eq=False, kw_only=True)
class AgentServer:
    """Answers requests that are signed with the cluster's key; snapshots have their own rules."""

    verifier: Verifier
    clock: Clock
    state: Callable[[], State]
    outputs: Callable[[], Mapping[int, Path]]
    """The output file of each rank."""
    ended_before: Callable[[], Sequence[Path]]
    """The folders of workers that ended before this generation."""
    rank_folder: Callable[[JobId, int, int], Path | None]
    """The folder of a rank of this generation of this job, if it is the present one."""
    rendezvous: Rendezvous
    preparation: Preparation
    snapshots: SnapshotRoutes
    checkpoints: CheckpointRoutes
    links: LinkRoutes
    feed: Callable[[Event], None]
    known: Callable[[], KnownGeneration | None]
    """What this node knows of its job's newest generation."""
    wake: Callable[[], None]
    """Makes the agent read the store now."""
    answered_s: Callable[[], float]
    """When a sailord last answered a report."""
    unreadable: UnreadableRecords
    tls: Tls | None = None
    strangers: StrangerLimits = field(default_factory=StrangerLimits)

    async def open(self, host: str, port: int) -> tuple[web.AppRunner, Listener]:
        """Start to listen; return the runner and the listener. Close the listener first."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._check_signature])
        app[UNSIGNED] = {}
        self.snapshots.add_to(app.router)
        self.checkpoints.add_to(app.router)
        self.links.add_to(app.router)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/report", self._report)
        app.router.add_get("/v1/generation", self._generation)
        app.router.add_post("/v1/abort", self._abort)
        app.router.add_post("/v1/wake", self._wake)
        app.router.add_get("/v1/logs", self._log)
        app.router.add_get("/v1/logs/setup", self._setup_log)
        app.router.add_get("/v1/logs/ended", self._ended_log)
        app.router.add_get("/v1/logs/{rank:[0-9]{1,5}}", self._log)
        generation = f"{{job:{JOB_ID_PATTERN}}}/{{generation:[0-9]{{1,12}}}}"
        app.router.add_get(f"/v1/steps/{generation}/{{rank:[0-9]{{1,5}}}}", self._kept_steps)
        app.router.add_get("/v1/packages/{package}/{part:[0-9]{1,4}}", self._package)
        app.router.add_get(f"/v1/meeting/{generation}", self._meeting)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        listener = Listener(runner, self.strangers, self.tls)
        try:
            await listener.start(host, port)
        except OSError:
            await runner.cleanup()
            raise
        return runner, listener

    @web.middleware
    async def _check_signature(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self.snapshots.checks(request) or self.checkpoints.checks(request):
                answer = await handler(request)
            elif request.path == "/metrics":
                return await self._answer_scrape(request, handler)
            elif why := refuse_stranger(request, *_callers(request)):
                answer = web.Response(status=403, text=f"{why}\n")
            else:
                answer = await answer_signed(request, self.verifier, handler)
        except web.HTTPException as error:
            answer = web.Response(status=error.status, text=error.text)
        if AUTHENTICATED not in request:
            charge(request, "signature")
            answer.force_close()
        return answer

    async def _answer_scrape(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let anyone read the metrics; over TLS, anyone with a certificate of the cluster."""
        if why := refuse_stranger(request, "sailord", "user"):
            charge(request, "certificate")
            answer: web.StreamResponse = web.Response(status=403, text=f"{why}\n")
        elif not charge(request, ""):
            answer = web.Response(status=429, text="too many requests; retry in 1 s\n")
        else:
            answer = await handler(request)
        answer.force_close()
        return answer

    async def _metrics(self, _: web.Request) -> web.Response:
        text = metrics_text(
            self.state(),
            now=self.clock.now(),
            answered_s=self.answered_s(),
            refused=self.strangers.by_cause(),
            unreadable=len(self.unreadable.found),
        )
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _report(self, _: web.Request) -> web.Response:
        report = self.state().last_report
        if report is None:
            return web.Response(status=503, text="the agent has not made a report yet; retry\n")
        return web.Response(body=encode(report))

    async def _generation(self, _: web.Request) -> web.Response:
        known = self.known()
        if known is None:
            return web.Response(status=404, text="no generation is known here\n")
        return web.Response(body=encode(known))

    async def _abort(self, request: web.Request) -> web.Response:
        try:
            abort = decode(Abort, await request.read())
        except WireError as error:
            return web.Response(status=422, text=f"{error}\n")
        heard = self.state().heard
        if abort.fence.term < heard.term:
            return web.Response(status=409, body=encode(heard))
        self.feed(AbortReceived(self.clock.now(), abort.job, abort.fence))
        return web.Response(body=b"{}")

    async def _wake(self, _: web.Request) -> web.Response:
        self.wake()
        return web.Response(body=b"{}")

    async def _log(self, request: web.Request) -> web.Response:
        rank = request.match_info.get("rank")
        ended = len(self.ended_before())
        return _answer_output(request, self.outputs(), None if rank is None else int(rank), ended)

    async def _ended_log(self, _: web.Request) -> web.Response:
        return web.Response(body=encode(read_ended(self.ended_before())))

    async def _setup_log(self, request: web.Request) -> web.Response:
        log = self.preparation.log
        return _answer_output(request, {} if log is None else {0: log}, None)

    async def _kept_steps(self, request: web.Request) -> web.Response:
        about = request.match_info
        job, generation, rank = JobId(about["job"]), int(about["generation"]), int(about["rank"])
        folder = self.rank_folder(job, generation, rank)
        found = None if folder is None else read_kept_steps(folder, self.clock.now())
        if found is None:
            return web.Response(status=404, text="no step of that rank is kept here\n")
        return web.Response(body=encode(found))

    async def _package(self, request: web.Request) -> web.Response:
        package = Package.named(request.match_info["package"])
        number, packages = int(request.match_info["part"]), self.preparation.fetcher
        part = None if package is None else read_part(packages.path(package), number)
        if part is None:
            return web.Response(status=404, text="the package is not here\n")
        return web.Response(body=part)

    async def _meeting(self, request: web.Request) -> web.Response:
        job, generation = JobId(request.match_info["job"]), int(request.match_info["generation"])
        address = await self.rendezvous.wait(job, generation)
        if address is None:
            return web.Response(status=404, text="the rendezvous is not known here\n")
        return web.Response(text=address)


def _callers(request: web.Request) -> tuple[CallerRole, ...]:
    return ("sailord", "agent") if request.path.startswith(FOR_AGENTS) else ("sailord",)


def _answer_output(
    request: web.Request, outputs: Mapping[int, Path], rank: int | None, ended: int = 0
) -> web.Response:
    """Answer with what was written since the mark of an earlier answer, or last."""
    mark = request.query.get("after", "")
    if not MARK.match(mark):
        return web.Response(status=422, text="after is not a mark of an earlier answer\n")
    return web.Response(body=encode(replace(read_output(outputs, rank, mark), ended=ended)))
