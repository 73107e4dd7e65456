"""Asks the planner, which thinks in processes of its own: the loop never waits.

What a process has worked out for one job and one kind of cluster it keeps, so that the next
question is answered in milliseconds. The planner itself is imported there alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar

import structlog

from agents.protocol.records import GenerationRecord, NodeRecord, Saving
from sailord.core.proposal import Proposal
from sailord.planning.machine_lifetimes import NOTHING_KNOWN, Past
from sailord.planning.mix import Mix
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError, Problem
from simulator.inputs.job_file import job_from_document
from simulator.spec.job import Job

log = structlog.get_logger("sailord")
T = TypeVar("T")

NICENESS = 19
"""Of the process that works ahead: nobody ever waits for it."""
GIVES_WAY = 2
"""Of those that answer: however long they think, who decides hears what happens meanwhile."""
PRELOADED = (
    "sailord.cli.errors",
    "sailord.planning.plan_search",
    "sailord.planning.capacity_search",
)
"""What the planner's processes have imported when they are born."""
WARM_AFTER_S = 1.5
AHEAD_BYTES_MAX = 48 << 20
"""Answers that are kept, packed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question, as it travels to another process."""

    spec: str
    cluster_file: Path
    profiles: Path | None
    nodes: tuple[NodeRecord, ...]
    running: bytes | None
    """The plan that runs, or ran last."""
    ran_on: tuple[NodeRecord, ...]
    is_safe: bool
    is_urgent: bool = False
    """Nothing runs: what is found at once is better than the best after a search."""
    past: Past = NOTHING_KNOWN
    factors: tuple[tuple[str, float], ...] = ()
    """By kind of GPU: what it was seen to compute over what is predicted."""
    slow: tuple[tuple[str, float], ...] = ()
    """Nodes of the running plan that are not among ``nodes``, as they take so many times as long
    as they should: is there anything better than to go on with them?"""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, ready to be stored."""

    proposal: Proposal
    plan: bytes
    about: dict[str, Any]
    """What the planner says of it: the figures to compare with what is measured, and why."""

    @property
    def about_bytes(self) -> bytes:
        return json.dumps(self.about, allow_nan=False).encode()


class Unanswered(str):
    """Why nobody found out whether there is a plan: the question is worth another try."""


def phases_of(move: Mapping[str, Any] | None) -> tuple[tuple[str, float], ...]:
    """What the planner says of each phase of a move, by the names under which they are measured."""
    phases = {} if move is None else move.get("phases", {})
    return tuple((name.removesuffix("_s"), seconds) for name, seconds in phases.items())


def the_same_again(record: GenerationRecord, plan: bytes, about: Mapping[str, Any]) -> Found | None:
    """What ran, on its nodes as before; ``None``: of such an old plan too little was written down.

    Nothing is searched for this, so that it takes no planner.
    """
    again = about.get("again")
    if again is None:
        return None
    proposal = Proposal(
        record.plan,
        record.members,
        is_worth_it=True,
        why="the same plan again: all its nodes are there",
        iteration_s=about["estimate"]["iteration_s"],
        move_s=again["seconds"],
        usd_per_hour=record.usd_per_hour,
        busy=record.busy,
        peaks=record.peaks,
        move_phases=phases_of(again),
    )
    return Found(proposal, plan, {**about, "why": [proposal.why], "move": again})


@dataclass(frozen=True, slots=True)
class WantedPool:
    """Machines that are alike: how many are up, and how many more could be had."""

    zone: str
    machine: str
    gpu: str
    gpus: int
    spot: bool
    up: int
    obtainable: int
    usd_per_hour: float | None
    unrented: int = 0
    """Of those that are up: machines that came by themselves."""


@dataclass(frozen=True, slots=True)
class WantRequest:
    """The question which machines there should be."""

    spec: str
    cluster_file: Path
    profiles: Path | None
    pools: tuple[WantedPool, ...]
    usd_per_hour_max: float | None
    move_s: float
    """What it is assumed to take to move the job once the machines are there."""
    usd_left: float | None = None
    """Of a total budget: what is dearer has to pay off within a shorter time."""
    mix: Mix = field(default_factory=Mix)
    past: Past = NOTHING_KNOWN


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many machines of each pool, in the question's order; ``None``: there is no plan."""

    counts: tuple[int, ...] | None
    why: str


@dataclass(eq=False)
class Desk:
    """One process of the planner, which takes one thing after the other."""

    niceness: int = 0
    waiting: int = 0
    _pool: ProcessPoolExecutor | None = field(default=None)
    _opening: asyncio.Task[object] | None = None

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Have it done there; raises ``BrokenProcessPool`` if the process died."""
        self.waiting += 1
        try:
            if self._pool is None:
                context = multiprocessing.get_context("forkserver")
                self._pool = ProcessPoolExecutor(
                    1, context, initializer=_begin_process, initargs=(self.niceness,)
                )
                # Whoever hands over the first task stands still until the process is there, which
                # takes seconds while the one that it is forked from is itself just beginning.
                begin = asyncio.to_thread(self._pool.submit, os.getpid)
                self._opening = asyncio.create_task(begin)
            pool, opening = self._pool, self._opening
            assert opening is not None
            try:
                await asyncio.shield(opening)
            except (OSError, EOFError) as error:
                self.clear()
                raise BrokenProcessPool(f"it could not begin: {error}") from None
            if self._pool is not pool:
                raise BrokenProcessPool("it was ended before it began")
            return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
        finally:
            self.waiting -= 1

    @property
    def processes(self) -> tuple[Any, ...]:
        """The pool has no public way to end a process that works."""
        return () if self._pool is None else _processes(self._pool)

    def clear(self) -> None:
        """End the process, whatever it is at; the next task gets a fresh one."""
        pool, opening, self._pool, self._opening = self._pool, self._opening, None, None
        if pool is None:
            return
        if opening is None or opening.done():
            _end(pool)
        else:  # Until its process is there, all that one may ask of it stands still.
            opening.add_done_callback(lambda _: _end(pool))


def _processes(pool: ProcessPoolExecutor) -> tuple[Any, ...]:
    return tuple((pool._processes or {}).values())


def _end(pool: ProcessPoolExecutor) -> None:
    for process in _processes(pool):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False)
class PlanningService:
    """Asks the planner, within a time, and outlives its processes.

    While a plan runs, what should follow the loss of each node is worked out ahead, by a process
    that gives way to all others and rests while there is a question.
    """

    _desks: tuple[Desk, ...] = field(default_factory=lambda: (Desk(GIVES_WAY), Desk(GIVES_WAY)))
    """The second is for while the first is still at an old question."""
    _newest: Request | None = None
    _is_free: asyncio.Event = field(default_factory=asyncio.Event)
    _scout: Desk = field(default_factory=lambda: Desk(niceness=NICENESS))
    _shopper: Desk = field(default_factory=lambda: Desk(niceness=NICENESS))
    """For questions about machines that are not there: it starts with the first of them."""
    _ahead: Ahead | None = None
    _scouting: asyncio.Task[None] | None = None
    _asking: int = 0
    _is_closed: bool = False
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._quiet.set()

    async def ask(self, request: Request, *, timeout_s: float) -> Found | str:
        """A plan, or why there is none."""
        known = None if self._ahead is None else self._ahead.answer(request)
        if known is not None:
            return known
        self._newest = request
        self._asking += 1
        self._quiet.clear()
        desk = None
        try:
            async with asyncio.timeout(timeout_s):
                desk = await self._free_desk()
                if self._newest is not request:
                    return Unanswered("a newer question came before this one had its turn")
                return await desk.run(_answer, request)
        except TimeoutError:
            if desk is not None:
                desk.clear()
            return Unanswered(f"it found nothing within {timeout_s:g} s")
        except BrokenProcessPool:
            assert desk is not None
            desk.clear()
            return Unanswered("its process died")
        finally:
            self._is_free.set()
            self._asking -= 1
            if not self._asking:
                self._quiet.set()

    async def _free_desk(self) -> Desk:
        """Wait for one; who waited for longer looks first, and then only the newest takes it."""
        while True:
            for desk in self._desks:
                if not desk.waiting:
                    return desk
            self._is_free.clear()
            await self._is_free.wait()

    async def want(self, request: WantRequest, *, timeout_s: float) -> Wanted:
        """Which machines there should be; asked of a process that no running job waits for."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._shopper.run(_want, request)
        except TimeoutError:
            self._shopper.clear()
            return Wanted(None, f"the planner found nothing within {timeout_s:g} s")
        except BrokenProcessPool:
            self._shopper.clear()
            return Wanted(None, "a process of the planner died")

    async def warm(self) -> None:
        """Have a process that has imported the planner: all others are forked from it, at once.

        Whoever does not lead yet has it too, so that a new leader need not wait for it. One that
        takes over a job at its very start has its cores for that first, unless a plan is wanted.
        """
        multiprocessing.set_forkserver_preload(list(PRELOADED))
        await asyncio.sleep(WARM_AFTER_S)
        forkserver.ensure_running()

    # ---- ahead of the questions ---------------------------------------------------------------

    def foresee(self, request: Request) -> None:
        """Work out what follows the plan that runs now, if this node is lost, or that one."""
        if self._is_closed:
            return
        if self._scouting is not None:
            self._scouting.cancel()
        self._ahead = Ahead(request)
        self._scouting = asyncio.create_task(self._look_ahead(self._ahead))

    @property
    def foreseen(self) -> int:
        """How many losses have an answer already."""
        return 0 if self._ahead is None else len(self._ahead.by_loss)

    async def _look_ahead(self, ahead: Ahead) -> None:
        begun = time.monotonic()
        try:
            await self._scout.run(_begin_ahead, ahead.request)
            while ahead.size_bytes < AHEAD_BYTES_MAX:
                await self._quiet.wait()
                step = await self._scout.run(_next_ahead)
                if step is None:
                    break
                ahead.add(*step)
            # What was not foreseen is found sooner where the tables stand already.
            await self._quiet.wait()
            await self._desks[0].run(_make_ready, ahead.request)
        except BrokenProcessPool:
            self._scout.clear()
            log.warning("the planner's process died that looked ahead")
        else:
            took_s = time.monotonic() - begun
            log.info("looked ahead", losses=len(ahead.by_loss), seconds=round(took_s, 2),
                     bytes=ahead.size_bytes)  # fmt: skip

    def close(self) -> None:
        """End the planner's processes, whatever they are at."""
        self._is_closed = True
        if self._scouting is not None:
            self._scouting.cancel()
        for desk in (*self._desks, self._scout, self._shopper):
            desk.clear()


@dataclass(eq=False)
class Ahead:
    """What follows one running plan when some of its nodes are lost."""

    request: Request
    by_loss: dict[frozenset[str], tuple[frozenset[str], bytes]] = field(default_factory=dict)
    """For the ids of lost nodes, the nodes of the next plan and the answer, packed."""
    used: frozenset[str] = frozenset()
    """Nodes on which the running plan stands."""
    size_bytes: int = 0

    def add(self, lost: frozenset[str], used: frozenset[str], found: Found) -> None:
        """One more answer."""
        packed = zlib.compress(pickle.dumps(found), 1)
        self.used = used
        self.by_loss[lost] = frozenset(found.proposal.members), packed
        self.size_bytes += len(packed)

    def answer(self, request: Request) -> Found | None:
        """The answer to a question that was foreseen; what came new since is left for later."""
        ours = self.request
        is_other = request.is_safe or bool(request.slow)
        if is_other or (request.running, request.spec) != (ours.running, ours.spec):
            return None
        there = {node.id for node in request.nodes}
        lost = frozenset(node.id for node in ours.nodes if node.id not in there)
        # Of a zone that went, or a node beside spare ones, what mattered may have been foreseen.
        for each in (lost, lost & self.used):
            nodes, packed = self.by_loss.get(each, (frozenset[str](), b""))
            if packed and nodes <= there:
                found = pickle.loads(zlib.decompress(packed))
                assert isinstance(found, Found)
                if there - {node.id for node in ours.nodes}:
                    soon = replace(found.proposal, ask_again_s=request.past.settle_s)
                    return replace(found, proposal=soon)
                return found
        return None


def _begin_process(niceness: int) -> None:
    os.nice(niceness)
    # Whoever stops sailord by hand stops the whole group; sailord itself ends its planners.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A sailord that was killed ends nobody: its planners must see for themselves."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(request: Request) -> Found | str:
    from sailord.planning.plan_search import answer  # noqa: PLC0415 - here begins what only a planner needs

    return answer(request)


def _want(request: WantRequest) -> Wanted:
    from sailord.planning.capacity_search import want  # noqa: PLC0415 - here begins what only a planner needs

    return want(request)


def _begin_ahead(request: Request) -> None:
    from sailord.planning.plan_search import begin_ahead  # noqa: PLC0415 - here begins what a planner needs

    begin_ahead(request)


def _next_ahead() -> tuple[frozenset[str], frozenset[str], Found] | None:
    from sailord.planning.plan_search import next_ahead  # noqa: PLC0415 - here begins what a planner needs

    return next_ahead()


def _make_ready(request: Request) -> None:
    from sailord.planning.plan_search import make_ready  # noqa: PLC0415 - here begins what a planner needs

    make_ready(request)


NAMES_OTHERS = ("config", "hf_config", "file", "description", "factory")
"""What a model of a submitted job may not be given by: who submits must not have our files read."""


def read_job(spec: str) -> Job:
    """Read a job as it was submitted; it stands by itself and names no other file."""
    document = parse_document(spec.encode(), name="job", flaws_raise=False)
    model = document.data.get("model")
    named = [key for key in NAMES_OTHERS if key in (model or {})]
    if isinstance(model, dict) and named:
        what = f"names a file or code of the model with {named[0]}"
        raise InputError(Problem("job: [model]", what, "describe the model by a family"))
    return job_from_document(document)


def job_shape(job: Job) -> tuple[int, int]:
    """How many layers, and into how many pieces the state of each is cut.

    What layers share counts as one more layer, what is not cut as one more piece of each.
    """
    return len(job.model.layers) + 1, job.max_tp + 1


def saving_of(job: Job) -> Saving:
    """How the job's state is to be kept; what is ``auto`` is chosen by what is measured."""
    kept = job.checkpoint
    memory = None if kept.memory_every == "auto" else kept.memory_every
    persist = None if kept.persist_every == "auto" else kept.persist_every
    uri = kept.uri
    if uri is not None and uri.startswith("/"):
        uri = f"file://{uri}"  # All who name an object there mean the same name.
    return Saving(uri, memory, persist, kept.keep, kept.survive)
