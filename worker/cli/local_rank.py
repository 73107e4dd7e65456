"""What one process of a run does: train step after step, and tell what came of it."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.checkpoint.resume import ResumePoint
from worker.cli.local_launcher import PeerFailedError, RunFailedError, SendMessage
from worker.data.batch import Data
from worker.distributed.in_process import ThreadWorld
from worker.distributed.interface import Transport, TransportError
from worker.distributed.process_groups import ProcessTransport
from worker.engines.deepspeed.config import DeepSpeedConfigError
from worker.engines.deepspeed.engine import DeepSpeedTrainer
from worker.models.apply_plan import ShardValues
from worker.profiling.activity_board import ActivityBoard
from worker.profiling.fault_injection import FailPoint
from worker.profiling.timeline import Recorder
from worker.training.full_tensors import RankTensors, rank_tensors
from worker.training.trainer import NotANumberError, StepReport, Trainer

DEADLINE_S = 600.0
"""No rank waits longer for another that lives; one that has died is noticed at once."""


@dataclass(frozen=True, slots=True)
class RunSpec:
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
    weights: Callable[[int], ShardValues] | None = None
    """What each layer begins with, where it is not its own initial weights."""
    keeps_spans: bool = False
    fail_at: FailPoint | None = None
    beginning: ResumePoint | None = None
    """Where training goes on from, if not at its start."""
    deepspeed: Mapping[str, Any] | None = None
    """DeepSpeed's configuration, where its engine trains."""
    pieces: Path | None = None
    """A folder in which each rank leaves its share of the trained weights."""


def train(orders: RunSpec, rank: int, say: SendMessage, *, board: ActivityBoard) -> None:
    """Be one rank of a run, from its first message to its last."""
    resident_bytes = _memory_bytes("VmRSS")
    torch.set_num_threads(orders.threads)
    device = torch.device(orders.device, rank) if orders.device == "cuda" else torch.device("cpu")
    recorder = Recorder(rank, board, keeps_spans=orders.keeps_spans, fail_at=orders.fail_at)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        recorder.finish_device_work = torch.cuda.synchronize
    if orders.deepspeed is None:
        _train(orders, rank, say, device=device, recorder=recorder)
    else:
        _train_by_deepspeed(orders, rank, say, device=device, recorder=recorder)
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
    else:
        # What the warm parent had is not counted: it is the same for all, and shared.
        peak_bytes = _memory_bytes("VmHWM") - resident_bytes
    spans = [asdict(span) for span in recorder.spans]
    say({"kind": "summary", "peak_memory_bytes": peak_bytes, "spans": spans})


def _train(
    orders: RunSpec, rank: int, say: SendMessage, *, device: torch.device, recorder: Recorder
) -> None:
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
        _resume(trainer, orders)
        for _ in range(orders.steps):
            _say_step(say, rank, trainer.step())
        with recorder.span("end"):
            if orders.pieces is not None:
                _leave(rank_tensors(trainer.buffers.values()), rank, orders.pieces)
            transport.close()


def _train_by_deepspeed(
    orders: RunSpec, rank: int, say: SendMessage, *, device: torch.device, recorder: Recorder
) -> None:
    assert orders.deepspeed is not None
    try:
        with recorder.span("start"):
            store = _meet(rank, listening=orders.listening)
            trainer = DeepSpeedTrainer(
                orders.job,
                orders.plan,
                rank,
                store,
                orders.data,
                orders.deepspeed,
                device=device,
                deadline_s=DEADLINE_S,
                weights=orders.weights,
            )
            _resume(trainer, orders)
        for _ in range(orders.steps):
            recorder.at_step(trainer.progress.step)
            with recorder.span("step"):
                report = trainer.step()
            _say_step(say, rank, report)
        with recorder.span("end"):
            if orders.pieces is not None:
                _leave(trainer.pieces(), rank, orders.pieces)
            trainer.close()
    except (NotANumberError, DeepSpeedConfigError) as error:
        raise RunFailedError(str(error)) from None
    except RuntimeError as error:
        # Torch says so of connections that break; if that was the cause, the parent knows whose.
        raise PeerFailedError(str(error).partition("\n")[0]) from error


def _resume(trainer: Trainer | DeepSpeedTrainer, orders: RunSpec) -> None:
    if orders.beginning is not None:
        trainer.restore(orders.beginning.logical, orders.beginning.progress)


@contextmanager
def _told(transport: Transport) -> Iterator[None]:
    """Let the other ranks know of a failure of this one, and the parent of what it means."""
    try:
        yield
    except TransportError as error:
        raise PeerFailedError(str(error)) from None
    except NotANumberError as error:
        # Every rank has found the same.
        raise RunFailedError(str(error)) from None
    except BaseException as error:
        transport.abort(f"{type(error).__name__}: {error}")
        raise


def _say_step(say: SendMessage, rank: int, report: StepReport) -> None:
    """Every rank knows the same of a step; one tells it."""
    if rank == 0:
        say({"kind": "step", **_line(report)})


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


def _leave(pieces: RankTensors, rank: int, folder: Path) -> None:
    masters = {key: parts for key, parts in pieces.items() if key[2] == "master"}
    try:
        torch.save(masters, folder / f"{rank}.pt")
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        what = f"rank {rank} cannot leave its weights in {folder.parent} ({reason})"
        raise RunFailedError(what) from None


def _memory_bytes(field: str) -> int:
    """A figure of this process's memory, as the kernel keeps it."""
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def connect(rank: int, *, ranks: int, listening: socket.socket, device: torch.device) -> Transport:
    """Open a rank's way to the others."""
    if ranks == 1:
        listening.close()
        return ThreadWorld(1).transport(0)
    try:
        store = _meet(rank, listening=listening)
        return ProcessTransport(store, rank, ranks, device=device, deadline_s=DEADLINE_S)
    except (RuntimeError, OSError) as error:
        raise PeerFailedError(f"rendezvous failed: {error}") from None


def _meet(rank: int, *, listening: socket.socket) -> Store:
    """Open what the ranks share, at a socket that was bound before the fork."""
    host, port = listening.getsockname()
    shared: dict[str, Any] = {"timeout": timedelta(seconds=DEADLINE_S)}
    if rank > 0:
        listening.close()
        return TCPStore(host, port, is_master=False, **shared)
    # The store takes the socket over, and closes it.
    taken = listening.detach()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=taken, **shared
    )
