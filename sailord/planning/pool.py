"""Processes that run the planner, so that the controller's event loop never waits for a search.

A process caches its tables by job and kinds of machines: a later request about the same job is
answered in milliseconds. Searches run only in these processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import forkserver
from typing import Any, Literal, TypeVar

import structlog

from agents.protocol.records import NodeId
from sailord.planning import child
from sailord.planning.messages import (
    CapacityAnswer,
    CapacityRequest,
    EndRequest,
    FoundPlan,
    NoAnswer,
    PlanRequest,
)
from sailord.planning.precomputed import NextPlan, NoPlan, PrecomputedPlans

log = structlog.get_logger("sailord")
T = TypeVar("T")

BACKGROUND_NICENESS = 19
"""For processes that no running job waits for."""
FOREGROUND_NICENESS = 2
"""For processes that answer requests: a search must not starve the event loop."""
PRELOADED = (
    "sailord.cli.shared.errors",
    "sailord.planning.plan_search",
    "sailord.planning.capacity_search",
)
"""Modules that the fork server imports before it forks planner processes."""
PRELOAD_DELAY_S = 1.5
PRECOMPUTED_BYTES_MAX = 48 << 20
"""Precomputing stops at this compressed size."""


@dataclass(eq=False)
class PlannerProcess:
    """One planner process; it runs one task after the other."""

    niceness: int = 0
    waiting: int = 0
    _pool: ProcessPoolExecutor | None = field(default=None)
    _starting: asyncio.Task[object] | None = None

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Run a function in the process; raises ``BrokenProcessPool`` if the process died."""
        self.waiting += 1
        try:
            if self._pool is None:
                context = multiprocessing.get_context("forkserver")
                self._pool = ProcessPoolExecutor(
                    1, context, initializer=child.start, initargs=(self.niceness,)
                )
                # The first submit blocks until the process exists, which takes seconds while the
                # fork server itself is still starting.
                start = asyncio.to_thread(self._pool.submit, os.getpid)
                self._starting = asyncio.create_task(start)
            pool, starting = self._pool, self._starting
            assert starting is not None
            try:
                await asyncio.shield(starting)
            except (OSError, EOFError) as error:
                self.kill()
                raise BrokenProcessPool(f"the process did not start: {error}") from None
            if self._pool is not pool:
                raise BrokenProcessPool("the process was killed before it started")
            return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
        finally:
            self.waiting -= 1

    def kill(self) -> None:
        """Kill the process, whatever it is doing; the next task starts a new one."""
        pool, starting, self._pool, self._starting = self._pool, self._starting, None, None
        if pool is None:
            return
        if starting is None or starting.done():
            _kill(pool)
        else:  # The executor's methods block until its process exists.
            starting.add_done_callback(lambda _: _kill(pool))


def _kill(pool: ProcessPoolExecutor) -> None:
    # The executor has no public way to kill a busy process.
    for process in tuple((pool._processes or {}).values()):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False)
class PlannerPool:
    """Answers planning requests within a time limit, and restarts processes that die.

    While a plan runs, a background process precomputes the answers to the loss of each node; it
    pauses while a request is open.
    """

    _workers: tuple[PlannerProcess, ...] = field(
        default_factory=lambda: tuple(PlannerProcess(FOREGROUND_NICENESS) for _ in range(2))
    )
    """Two, so that a new request need not wait for an outdated one."""
    _newest: dict[str, PlanRequest] = field(default_factory=dict)
    """The newest open request of each job."""
    _worker_freed: asyncio.Event = field(default_factory=asyncio.Event)
    _ahead_worker: PlannerProcess = field(
        default_factory=lambda: PlannerProcess(BACKGROUND_NICENESS)
    )
    _capacity_worker: PlannerProcess = field(
        default_factory=lambda: PlannerProcess(BACKGROUND_NICENESS)
    )
    _precomputed: PrecomputedPlans | None = None
    _precomputing: asyncio.Task[None] | None = None
    _open_requests: int = 0
    _is_closed: bool = False
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request is open."""

    def __post_init__(self) -> None:
        self._idle.set()

    async def ask(
        self, request: PlanRequest, *, timeout_s: float, job: str = ""
    ) -> FoundPlan | str:
        """Return a plan, or why there is none; of the requests of a job that wait, the newest."""
        known = None if self._precomputed is None else self._precomputed.answer(request)
        if known is not None:
            return known
        self._newest[job] = request
        self._open_requests += 1
        self._idle.clear()
        worker = None
        try:
            async with asyncio.timeout(timeout_s):
                worker = await self._free_worker()
                if self._newest.get(job) is not request:
                    return NoAnswer("superseded by a newer request")
                found: FoundPlan | str = await worker.run(child.call, "plan_search.answer", request)
                return found
        except TimeoutError:
            if worker is not None:
                worker.kill()
            return NoAnswer(f"no plan found within {timeout_s:g} s")
        except BrokenProcessPool:
            assert worker is not None
            worker.kill()
            return NoAnswer("the planner process died")
        finally:
            if self._newest.get(job) is request:
                del self._newest[job]
            self._worker_freed.set()
            self._open_requests -= 1
            if not self._open_requests:
                self._idle.set()

    async def _free_worker(self) -> PlannerProcess:
        """Wait for a free process. Waiters wake in order; all but each job's newest give up."""
        while True:
            for worker in self._workers:
                if not worker.waiting:
                    return worker
            self._worker_freed.clear()
            await self._worker_freed.wait()

    async def ask_capacity(self, request: CapacityRequest, *, timeout_s: float) -> CapacityAnswer:
        """Return which machines to rent; runs in a background process."""
        try:
            async with asyncio.timeout(timeout_s):
                found: CapacityAnswer = await self._capacity_worker.run(
                    child.call, "capacity_search.choose_capacity", request
                )
                return found
        except TimeoutError:
            self._capacity_worker.kill()
            return CapacityAnswer(None, f"the planner found nothing within {timeout_s:g} s")
        except asyncio.CancelledError:  # The job ended; the next question must not wait.
            self._capacity_worker.kill()
            raise
        except BrokenProcessPool:
            self._capacity_worker.kill()
            return CapacityAnswer(None, "the planner process died")

    async def ask_end(
        self, what: Literal["shortest_s", "least_usd"], request: EndRequest, *, timeout_s: float
    ) -> float | str:
        """Return what all steps left take at least, or why that is not known."""
        late = f"the planner found nothing within {timeout_s:g} s"
        found: float | str = await self._tell(f"capacity_search.{what}", request, timeout_s, late)
        return found

    async def ask_timeline(self, request: PlanRequest, *, timeout_s: float) -> Any:
        """Return the predicted schedule of the running plan, or a text: why there is none."""
        late = f"the planner is busy: no schedule within {timeout_s:g} s"
        return await self._tell("timeline.timeline", request, timeout_s, late)

    async def _tell(self, what: str, request: object, timeout_s: float, late: str) -> Any:
        """Answer a person in the process that plans capacity."""
        worker = self._capacity_worker
        try:
            async with asyncio.timeout(timeout_s):
                return await worker.run(child.call, what, request)
        except TimeoutError:
            # The search would go on, unread, and the next question wait for it.
            if not worker.waiting:
                worker.kill()
            return NoAnswer(late)
        except BrokenProcessPool:
            worker.kill()
            return NoAnswer("the planner process died")

    async def preload(self) -> None:
        """Start a fork server that has imported the planner; planner processes fork from it.

        A standby does so too, so that it can plan at once when it is elected. The delay leaves
        the cores to a takeover right after the start.
        """
        multiprocessing.set_forkserver_preload(list(PRELOADED))
        await asyncio.sleep(PRELOAD_DELAY_S)
        forkserver.ensure_running()

    # ---- precomputed plans --------------------------------------------------------------------

    def precompute(self, request: PlanRequest) -> None:
        """Compute, in the background, the next plan for each likely loss of nodes."""
        if self._is_closed:
            return
        if self._precomputing is not None:
            self._precomputing.cancel()
        self._precomputed = PrecomputedPlans(request)
        self._precomputing = asyncio.create_task(self._precompute(self._precomputed))

    def following(self, lost: NodeId) -> NextPlan | NoPlan | None:
        """Return the precomputed plan that would follow the loss of a node, or why none would."""
        known = self._precomputed
        return None if known is None else known.following.get(frozenset([lost]))

    @property
    def precomputed_losses(self) -> int:
        """Number of losses whose next plan is known."""
        return 0 if self._precomputed is None else len(self._precomputed.by_loss)

    async def _precompute(self, plans: PrecomputedPlans) -> None:
        begun, worker = time.monotonic(), self._ahead_worker
        try:
            await worker.run(child.call, "plan_search.start_precomputing", plans.request)
            while plans.size_bytes < PRECOMPUTED_BYTES_MAX:
                await self._idle.wait()
                step = await worker.run(child.call, "plan_search.precompute_next")
                if step is None:
                    break
                plans.add(*step)
            # Requests without a precomputed answer are faster once the tables exist.
            await self._idle.wait()
            worker = self._workers[0]
            await worker.run(child.call, "plan_search.build_tables", plans.request)
        except BrokenProcessPool:
            worker.kill()
            log.warning("the process that precomputes plans died")
        except Exception:
            log.exception("plans are not precomputed: sailord failed")
        else:
            took_s = time.monotonic() - begun
            log.info("plans precomputed", losses=len(plans.by_loss), seconds=round(took_s, 2),
                     bytes=plans.size_bytes)  # fmt: skip

    def close(self) -> None:
        """Kill all planner processes."""
        self._is_closed = True
        if self._precomputing is not None:
            self._precomputing.cancel()
        for worker in (*self._workers, self._ahead_worker, self._capacity_worker):
            worker.kill()
