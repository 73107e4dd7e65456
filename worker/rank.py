"""What one process of a run does: train step after step, and tell what came of it."""

from __future__ import annotations

import gc
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from simulator.job import Job
from simulator.plan import Plan
from worker.data.samples import Data
from worker.launch import PeerFailed, RunFailed, Say
from worker.parallelize import Values
from worker.state import pieces_of
from worker.timeline import Board, FailPoint, Recorder
from worker.trainer import NotANumberError, StepReport, Trainer
from worker.transport.base import Transport, TransportError
from worker.transport.processes import ProcessTransport
from worker.transport.threads import ThreadWorld

DEADLINE_S = 600.0
"""No rank waits longer for another that lives; one that has died is noticed at once."""


def warm_up() -> None:
    """Load what layers load when they are first built, once for all ranks and before the fork."""
    with torch.device("meta"):
        # Its initial values are a long story to torch where there is no memory for them.
        torch.nn.Embedding(1, 1)
    # What is there now stays: ranks need not look through it again, nor copy it by doing so.
    gc.freeze()


@dataclass(frozen=True, slots=True)
class Orders:
    """All that the ranks of a run are told before they are forked."""

    job: Job
    plan: Plan
    data: Data
    steps: int
    device: str
    """``cpu``, or ``cuda``: each rank takes the GPU of its number."""
    threads: int
    """Of each rank, where it computes on the CPU."""
    listening: socket.socket
    """Where the ranks meet."""
    weights: Callable[[int], Values] | None = None
    """What each layer begins with, where it is not its own initial weights."""
    keeps_spans: bool = False
    fail_at: FailPoint | None = None
    pieces: Path | None = None
    """A folder in which each rank leaves its share of the trained weights."""


def train(orders: Orders, rank: int, say: Say, *, board: Board) -> None:
    """Be one rank of a run, from its first message to its last."""
    resident_bytes = _memory_bytes("VmRSS")
    torch.set_num_threads(orders.threads)
    device = torch.device(orders.device, rank) if orders.device == "cuda" else torch.device("cpu")
    recorder = Recorder(rank, board, keeps_spans=orders.keeps_spans, fail_at=orders.fail_at)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        recorder.finish_device_work = torch.cuda.synchronize
    with recorder.span("start"):
        ranks = orders.plan.device_count
        transport = connect(rank, ranks=ranks, listening=orders.listening, device=device)
    with _told(transport):
        trainer = Trainer(
            orders.job,
            orders.plan,
            rank,
            transport,
            orders.data,
            device=device,
            recorder=recorder,
            weights=orders.weights,
        )
        for _ in range(orders.steps):
            report = trainer.step()
            if rank == 0:
                say({"kind": "step", **_line(report)})
        with recorder.span("end"):
            if orders.pieces is not None:
                _leave_pieces(trainer, orders.pieces / f"{rank}.pt")
            transport.close()
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
    else:
        # What the warm parent had is not counted: it is the same for all, and shared.
        peak_bytes = _memory_bytes("VmHWM") - resident_bytes
    spans = [asdict(span) for span in recorder.spans]
    say({"kind": "summary", "peak_memory_bytes": peak_bytes, "spans": spans})


@contextmanager
def _told(transport: Transport) -> Iterator[None]:
    """Let the other ranks know of a failure of this one, and the parent of what it means."""
    try:
        yield
    except TransportError as error:
        raise PeerFailed(str(error)) from None
    except NotANumberError as error:
        # Every rank has found the same.
        raise RunFailed(str(error)) from None
    except BaseException as error:
        transport.abort(f"{type(error).__name__}: {error}")
        raise


def _line(report: StepReport) -> dict[str, Any]:
    """What is printed of a step; JSON knows no number that is not finite."""
    line = {
        "step": report.step,
        "loss": _finite(report.loss),
        "grad_norm": _finite(report.grad_norm),
        "samples": report.samples,
        "seconds": report.seconds,
        "sample_hash": report.sample_hash,
    }
    return {**line, "skipped": True} if report.skipped else line


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _leave_pieces(trainer: Trainer, path: Path) -> None:
    pieces = pieces_of(trainer.memories.values())
    torch.save({key: parts for key, parts in pieces.items() if key[2] == "master"}, path)


def _memory_bytes(field: str) -> int:
    """A figure of this process's memory, as the kernel keeps it."""
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def connect(rank: int, *, ranks: int, listening: socket.socket, device: torch.device) -> Transport:
    """Open a rank's way to the others, who meet at a socket that was opened before the fork."""
    if ranks == 1:
        listening.close()
        return ThreadWorld(1).transport(0)
    host, port = listening.getsockname()
    wait = timedelta(seconds=DEADLINE_S)
    try:
        if rank == 0:
            # The store takes the socket over, and closes it.
            socket_of_store = listening.detach()
            store = TCPStore(
                host,
                port,
                is_master=True,
                timeout=wait,
                wait_for_workers=False,
                master_listen_fd=socket_of_store,
            )
        else:
            listening.close()
            store = TCPStore(host, port, is_master=False, timeout=wait)
        return ProcessTransport(store, rank, ranks, device=device, deadline_s=DEADLINE_S)
    except (RuntimeError, OSError) as error:
        raise PeerFailed(f"the ranks did not meet: {error}") from None
