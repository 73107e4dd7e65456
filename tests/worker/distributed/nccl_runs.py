"""Runs of the whole runtime under NCCL's rules, with deaths: ranks are threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from tests.worker.distributed import nccl_rules
from tests.worker.distributed.nccl_rules import Device, EmulatedNccl, World
from tests.worker.training_runs import SomeLabels
from worker.distributed import process_groups
from worker.distributed.interface import AbortedError, PeerLostError, TransportError
from worker.distributed.process_groups import ProcessTransport
from worker.profiling.fault_injection import FailPoint
from worker.profiling.timeline import Recorder
from worker.training.precision import FP64
from worker.training.trainer import RankTrainer

PHASES = (
    *("met", "verified", "forward", "backward", "send", "receive"),
    *("sync", "wait", "vote", "step"),
)
"""Where a rank may be killed."""


AtEnd = Callable[[RankTrainer, ProcessTransport], None]
"""What each rank does after its last step."""


class DiedError(BaseException):
    """The rank's process was killed."""


class MortalRecorder(Recorder):
    """Ends a rank's thread where a real one kills its process."""

    def reached_point(self, place: Any) -> None:
        point = self.fail_at
        if point is not None and point.is_at(self.rank, place, self.step, self.generation):
            raise DiedError


@dataclass
class Outcome:
    """What became of one rank."""

    losses: list[float] = field(default_factory=list)
    step: int = 0
    lost: int | None = None
    """The rank that this one knows to be lost."""
    failure: BaseException | None = None
    was_killed: bool = False
    is_stuck: bool = False
    contexts_elsewhere: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One word: for the table."""
        if isinstance(self.failure, DiedError):
            return "dead"
        if self.was_killed:
            return "killed by its watchdog"
        if isinstance(self.failure, AssertionError):
            return "hangs"
        if self.is_stuck:
            return "replaced"
        if self.lost is not None:
            return "recovered"
        return "done" if self.failure is None else repr(self.failure)


def run_generation(
    job: Job,
    plan: Plan,
    *,
    steps: int = 2,
    generation: int = 0,
    fail_at: FailPoint | None = None,
    world: World | None = None,
    store: Store | None = None,
    rules: Mapping[str, Any] | None = None,
    deadline_s: float = 30.0,
    at_end: AtEnd = lambda *_: None,
    finish_device_work: Callable[[Device], None] | None = None,
) -> list[Outcome]:
    """Train all ranks of a plan, each in a thread, until the end or a death.

    ``finish_device_work`` is done at the end of each span; without it spans are not kept.
    """
    world, store = world or World(), store or HashStore()
    devices = [world.device(rank) for rank in range(plan.device_count)]
    found = [Outcome() for _ in devices]

    def run(device: Device) -> None:
        outcome = found[device.rank]
        library = EmulatedNccl(world, device, str(generation), **(rules or {}))
        recorder = MortalRecorder(device.rank, fail_at=fail_at, generation=generation)
        if finish_device_work is not None:
            recorder.keeps_spans = True
            recorder.finish_device_work = partial(finish_device_work, device)

        def connect() -> ProcessTransport:
            return ProcessTransport(
                store,
                device.rank,
                plan.device_count,
                generation=str(generation),
                backends=library,
                deadline_s=deadline_s,
            )

        try:
            _live(job, plan, device, outcome, steps, recorder, connect, at_end)
        except BaseException as failure:
            outcome.failure = failure
        outcome.was_killed = device.was_killed
        outcome.contexts_elsewhere = device.contexts_elsewhere

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _live(
    job: Job,
    plan: Plan,
    device: Device,
    outcome: Outcome,
    steps: int,
    recorder: Recorder,
    connect: Callable[[], ProcessTransport],
    at_end: AtEnd,
) -> None:
    transport: ProcessTransport | None = None
    try:
        transport = connect()
        recorder.reached_point("met")
        trainer = RankTrainer(
            job, plan, device.rank, transport, SomeLabels(job), precision=FP64, recorder=recorder
        )
        recorder.reached_point("verified")
        try:
            for _ in range(steps):
                outcome.losses.append(trainer.step().loss)
            at_end(trainer, transport)
        except TransportError:
            trainer.roll_forward()
            raise
        finally:
            outcome.step = trainer.progress.step
            trainer.close()
    except TransportError as failure:
        outcome.lost = failure.rank if isinstance(failure, PeerLostError) else None
        outcome.failure = failure
    except (DiedError, SystemExit):
        # The kernel closes the connections of a process, whatever it was doing.
        device.is_dead = True
        if transport is not None:
            transport._monitor.failure = AbortedError("dead")  # The dead tell nothing.
            for peer in transport._monitor._peers.values():
                peer.shutdown(socket.SHUT_RDWR)
        raise
    except Exception as failure:
        if transport is not None:
            transport.abort(repr(failure))
        raise
    finally:
        if transport is not None:
            transport.close()
            outcome.is_stuck = transport.is_stuck


@contextmanager
def closing_within(seconds: float) -> Iterator[None]:
    """Set how long a transport waits for its groups, and what counts as forever."""
    before = process_groups.CLOSE_S, nccl_rules.GIVE_UP_S
    process_groups.CLOSE_S = nccl_rules.GIVE_UP_S = seconds
    try:
        yield
    finally:
        process_groups.CLOSE_S, nccl_rules.GIVE_UP_S = before
