"""Ranks as real processes, forked from a server that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from tests.worker.checksums import checksums
from tests.worker.training_runs import SomeLabels
from worker.distributed.backends import GlooBackends
from worker.distributed.interface import (
    AbortedError,
    Collective,
    DeadlineError,
    PeerLostError,
    TransportError,
)
from worker.distributed.process_groups import ProcessTransport
from worker.profiling.fault_injection import FailPoint
from worker.profiling.timeline import Recorder
from worker.training.precision import FP64
from worker.training.trainer import RankTrainer

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])

Body = Callable[..., Any]


def as_processes(folder: Path, size: int, body: Body, *args: Any) -> list[Any]:
    """Run ``body(rank, size, store, *args)`` in processes; a killed rank returns ``None``."""
    path = folder / f"store {time.monotonic_ns()}"
    processes, ends = [], []
    for rank in range(size):
        end, theirs = _CONTEXT.Pipe(duplex=False)
        arguments = (theirs, rank, size, str(path), body, args)
        processes.append(_CONTEXT.Process(target=_be, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        ends.append(end)
    try:
        return [_result(end) for end in ends]
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.join(30)
            assert process.exitcode in (0, -signal.SIGKILL), f"a rank ended by {process.exitcode}"


def _result(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return None


def _be(end: Connection, rank: int, size: int, path: str, body: Body, args: Any) -> None:
    torch.set_num_threads(1)
    end.send(body(rank, size, FileStore(path, size), *args))
    end.close()


# -- what ranks do --------------------------------------------------------------------------------


def noticed(failure: TransportError) -> tuple[str, int | None]:
    """Return a failure's type and rank, to compare."""
    rank = failure.rank if isinstance(failure, PeerLostError | AbortedError) else None
    return type(failure).__name__, rank


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def train_generations(
    rank: int, _: int, store: FileStore, job: Job, plans: list[Plan], steps: int
) -> tuple[list[Any], list[int]]:
    """Train under one plan after the other; return the results and the open files after each."""
    results, left = [], []
    for generation, plan in enumerate(plans):
        size = plan.device_count
        if rank < size:
            transport = ProcessTransport(store, rank, size, generation=str(generation))
            trainer = RankTrainer(job, plan, rank, transport, SomeLabels(job), precision=FP64)
            reports = [trainer.step() for _ in range(steps)]
            transport.close()
            sums = {k: v for m in trainer.buffers.values() for k, v in checksums(m).items()}
            results.append(([(r.loss, r.grad_norm, r.sample_hash) for r in reports], sums))
        else:
            results.append(None)
        left.append(open_files())
    return results, left


def train_until_lost(
    rank: int, size: int, store: FileStore, job: Job, plan: Plan, fail_at: FailPoint
) -> Any:
    """Train until a rank is lost."""
    transport = ProcessTransport(store, rank, size)
    recorder = Recorder(rank, fail_at=fail_at)
    trainer = RankTrainer(job, plan, rank, transport, SomeLabels(job), recorder=recorder)
    try:
        while True:
            trainer.step()
    except TransportError as failure:
        return noticed(failure)
    finally:
        transport.close()


def exchange_parts(rank: int, size: int, store: FileStore, dtype: torch.dtype) -> Any:
    """Gather and sum parts; return the results, and how many operations were numbered."""
    transport = ProcessTransport(store, rank, size)
    try:
        group, before = transport.group(tuple(range(size))), transport.operations.counts["all"]
        return *exchanged(group, dtype), transport.operations.counts["all"] - before
    finally:
        transport.close()


def exchanged(group: Collective, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Gather the ranks' numbers, and sum parts that a rank multiplies by its number from 1.

    At last sum these numbers on rank 1 alone.
    """
    gathered = group.all_gather(torch.full((2, 1), group.index, dtype=dtype))
    parts = torch.arange(2 * group.size, dtype=dtype).view(group.size, 1, 2)
    scattered = group.reduce_scatter(parts * (group.index + 1)).tolist()
    total = torch.full((3,), group.index + 1, dtype=dtype)
    group.start_reduce(total, target=1).wait()
    return gathered.tolist(), scattered, total.tolist() if group.index == 1 else None


def exchanged_by(rank: int, size: int) -> tuple[Any, ...]:
    """Return what ``exchanged`` should on a rank."""
    total = size * (size + 1) / 2
    parts = [[2 * rank * total, (2 * rank + 1) * total]]
    return [[[n]] * 2 for n in range(size)], parts, [total] * 3 if rank == 1 else None


def wait_for_the_dead(rank: int, size: int, store: FileStore, what: str) -> Any:
    """Wait for rank 0 in some way while it is killed."""
    transport = ProcessTransport(store, rank, size)
    tensor = torch.ones(2**22)
    everybody = transport.group(tuple(range(size)))
    others = transport.group(tuple(range(1, size))) if rank > 0 else None
    everybody.all_reduce(torch.zeros(1))
    if rank == 0:
        time.sleep(0.1)  # The others usually wait by now; if not, they notice when they start to.
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        match what:
            case "all-reduce":
                everybody.all_reduce(tensor)
            case "reduce":
                everybody.start_reduce(tensor, target=1).wait()
            case "all-gather":
                everybody.all_gather(tensor)
            case "reduce-scatter":
                everybody.reduce_scatter(torch.ones(size, 2**21))
            case "send":
                transport.send(tensor, to=0).wait()
            case "receive":
                transport.receive(tensor, source=0).wait()
            case "others":
                # Rank 1 never joins: ranks that wait for it do not wait for the dead rank.
                assert others is not None
                if rank == 1:
                    transport.receive(tensor, source=0).wait()
                others.all_reduce(tensor)
    except TransportError as failure:
        return noticed(failure), str(failure)
    finally:
        transport.close()
    return "nothing"


def wait_for_one_who_never_joins(rank: int, size: int, store: FileStore) -> Any:
    """Rank 0 is killed before it opens the groups that others open with it."""
    try:
        # Others may still open the group of all when rank 0 is killed.
        transport = ProcessTransport(store, rank, size)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            transport.group((0, rank))
        finally:
            transport.close()
    except TransportError as failure:
        return noticed(failure)
    return "nothing"


class _Dying(GlooBackends):
    """A rank that is killed before it connects."""

    def open(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def connect_to_one_who_dies(rank: int, size: int, store: FileStore) -> Any:
    """Rank 0 is killed after all have come to open a group, and before it connects to them."""
    stuck: list[str] = []
    dying = _Dying("127.0.0.1", 1.0) if rank == 0 else None
    try:
        ProcessTransport(store, rank, size, on_stuck=stuck.append, backends=dying)
    except TransportError as failure:
        return noticed(failure), stuck
    return "nothing"


def abort_while_others_wait(rank: int, size: int, store: FileStore) -> Any:
    """Rank 1 aborts while the others wait."""
    try:
        # Others may still open the group of all when rank 1 aborts.
        transport = ProcessTransport(store, rank, size)
        try:
            if rank == 1:
                transport.abort("bad sample")
            transport.group(tuple(range(size))).all_reduce(torch.zeros(1))
        finally:
            transport.close()
    except AbortedError as failure:
        return str(failure)
    return "nothing"


def outlast_the_deadline(rank: int, size: int, store: FileStore) -> Any:
    """Rank 0 waits for a message that is never sent."""
    transport = ProcessTransport(store, rank, size, deadline_s=2.0)
    try:
        if rank == 0:
            transport.receive(torch.zeros(1), source=1).wait()
        else:
            time.sleep(0.1)
            transport.receive(torch.zeros(1), source=0).wait()
    except (DeadlineError, AbortedError) as failure:
        return noticed(failure)
    finally:
        transport.close()
    return "nothing"
