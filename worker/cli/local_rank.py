"""One process of a local run: trains step by step and reports to the parent."""

from __future__ import annotations

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

from simulator.documents.problems import InputError
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.checkpoint.by_tensor.resume import ResumePoint
from worker.cli.local_launcher import PeerFailedError, RunFailedError, SendMessage
from worker.cli.own_output import printing_to_stderr
from worker.data.batch import DataSource
from worker.devices.rank_device import device_failure, finish_computing, set_up
from worker.distributed.interface import Transport, TransportError
from worker.distributed.process_groups import ProcessTransport
from worker.distributed.rendezvous import serve_store
from worker.distributed.single_rank import SingleRankTransport
from worker.engines.deepspeed.config import DeepSpeedConfigError
from worker.engines.deepspeed.engine import DeepSpeedTrainer
from worker.models.apply_plan import ShardValues
from worker.models.user_module.module_layers import ModuleSource
from worker.profiling.activity_board import ActivityBoard
from worker.profiling.fault_injection import FailPoint
from worker.profiling.timeline import Recorder
from worker.script.open_job import open_module
from worker.script.script_error import print_script_traceback
from worker.training.full_tensors import RankTensors, rank_tensors
from worker.training.step_report import StepReport, finite
from worker.training.trainer import NotANumberError, RankTrainer

DEADLINE_S = 600.0
"""Seconds that a rank waits for a peer that is not known to be lost."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What the ranks of a run need; fixed before they are forked."""

    job: Job
    plan: Plan
    steps: int
    device: str
    """``cpu``, or ``cuda``: each rank uses the GPU with its number."""
    threads: int
    """CPU threads of each rank."""
    listening: socket.socket
    """The socket of the rendezvous."""
    weights: Callable[[int], ShardValues] | None = None
    """Returns the initial weights of a layer, if they are not the job's random ones."""
    data: DataSource | None = None
    """The data of a job of a known model."""
    module: Path | None = None
    """A script or job file that gives module and data; each rank opens it anew."""
    arguments: tuple[str, ...] = ()
    """The arguments of the script."""
    keeps_spans: bool = False
    fail_at: FailPoint | None = None
    beginning: ResumePoint | None = None
    """The checkpoint to continue from."""
    deepspeed: Mapping[str, Any] | None = None
    """DeepSpeed's configuration, if its engine trains."""
    pieces: Path | None = None
    """Folder for each rank's shard of the trained weights."""


def train(spec: RunSpec, rank: int, send: SendMessage, *, board: ActivityBoard) -> None:
    """Run one rank, from its first message to its last."""
    resident_bytes = _memory_bytes("VmRSS")
    torch.set_num_threads(spec.threads)
    device = torch.device(spec.device, rank) if spec.device == "cuda" else torch.device("cpu")
    recorder = Recorder(rank, board, keeps_spans=spec.keeps_spans, fail_at=spec.fail_at)
    if device.type == "cuda":
        set_up(device)
        recorder.finish_device_work = finish_computing
    if spec.deepspeed is None:
        _train(spec, rank, send, device=device, recorder=recorder)
    else:
        _train_by_deepspeed(spec, rank, send, device=device, recorder=recorder)
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
    else:
        # The parent's memory is shared by all ranks and not counted.
        peak_bytes = _memory_bytes("VmHWM") - resident_bytes
    spans = [asdict(span) for span in recorder.spans]
    send({"kind": "summary", "peak_memory_bytes": peak_bytes, "spans": spans})


def _train(
    spec: RunSpec, rank: int, send: SendMessage, *, device: torch.device, recorder: Recorder
) -> None:
    with recorder.span("start"):
        ranks = spec.plan.device_count
        transport = connect(rank, ranks=ranks, listening=spec.listening, device=device)
    with _reporting_errors(transport, rank, device, recorder):
        data, module = _data_and_module(spec)
        about = spec.job, spec.plan, rank, transport, data
        trainer = RankTrainer(
            *about, device=device, recorder=recorder, weights=spec.weights, module=module
        )
        _resume(trainer, spec)
        for _ in range(spec.steps):
            report = trainer.step()
            _send_step(send, rank, report)
            trainer.log(report)
            found = trainer.evaluate_if_due()
            if found is not None and rank == 0:
                metrics = finite(found)  # JSON has no other numbers.
                send({"kind": "evaluation", "step": report.step, "metrics": metrics})
        trainer.end_log()
        with recorder.span("end"):
            if spec.pieces is not None:
                _save_shard(rank_tensors(trainer.buffers.values()), rank, spec.pieces)
            trainer.close()
            transport.close()


def _data_and_module(spec: RunSpec) -> tuple[DataSource, ModuleSource | None]:
    if spec.module is None:
        assert spec.data is not None, "a job of a known model has data of its own"
        return spec.data, None
    with printing_to_stderr():
        recipe = open_module(spec.module, spec.job, spec.arguments)
    return recipe.data(spec.job.data.samples), recipe


def _train_by_deepspeed(
    spec: RunSpec, rank: int, send: SendMessage, *, device: torch.device, recorder: Recorder
) -> None:
    assert spec.deepspeed is not None
    try:
        with recorder.span("start"):
            store = _meet(rank, listening=spec.listening)
            data, _ = _data_and_module(spec)
            about = spec.job, spec.plan, rank, store, data, spec.deepspeed
            trainer = DeepSpeedTrainer(
                *about, device=device, deadline_s=DEADLINE_S, weights=spec.weights
            )
            _resume(trainer, spec)
        for _ in range(spec.steps):
            recorder.at_step(trainer.progress.step)
            with recorder.span("step"):
                report = trainer.step()
            _send_step(send, rank, report)
        with recorder.span("end"):
            if spec.pieces is not None:
                _save_shard(trainer.rank_tensors(), rank, spec.pieces)
            trainer.close()
    except (NotANumberError, DeepSpeedConfigError) as error:
        raise RunFailedError(str(error)) from None
    except RuntimeError as error:
        text = device_failure(error, rank=rank, device=device, activity=recorder.activity_text)
        if text is not None:
            print_script_traceback(error)
            raise RunFailedError(text) from None
        # torch raises this for broken connections; the parent knows which rank caused it.
        raise PeerFailedError(str(error).partition("\n")[0]) from error


def _resume(trainer: RankTrainer | DeepSpeedTrainer, spec: RunSpec) -> None:
    if spec.beginning is not None:
        trainer.restore(spec.beginning.logical, spec.beginning.progress)


@contextmanager
def _reporting_errors(
    transport: Transport, rank: int, device: torch.device, recorder: Recorder
) -> Iterator[None]:
    """Abort the other ranks if this one fails, and classify the error for the parent."""
    try:
        yield
    except TransportError as error:
        raise PeerFailedError(str(error)) from None
    except NotANumberError as error:
        # Every rank raises the same.
        raise RunFailedError(str(error)) from None
    except InputError as error:
        message = "; ".join(map(str, error.problems))
        transport.abort(message)
        raise RunFailedError(message) from None
    except BaseException as error:
        text = device_failure(error, rank=rank, device=device, activity=recorder.activity_text)
        transport.abort(text or f"{type(error).__name__}: {error}")
        if text is not None:
            print_script_traceback(error)
            raise RunFailedError(text) from None
        raise


def _send_step(send: SendMessage, rank: int, report: StepReport) -> None:
    """Send a step's report from rank 0 alone: those of all ranks have the same results."""
    if rank == 0:
        send({"kind": "step", **report.line()})


def _save_shard(pieces: RankTensors, rank: int, folder: Path) -> None:
    masters = {
        # Numbers, since a range is an object that only pickle could read.
        key: [(None if held is None else (held.start, held.stop), part) for held, part in parts]
        for key, parts in pieces.items()
        if key[2] == "master"
    }
    try:
        torch.save(masters, folder / f"{rank}.pt")
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        what = f"rank {rank} cannot write its weights to {folder.parent} ({reason})"
        raise RunFailedError(what) from None


def _memory_bytes(field: str) -> int:
    """Return a value from this process's status in /proc."""
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def connect(rank: int, *, ranks: int, listening: socket.socket, device: torch.device) -> Transport:
    """Connect a rank to the others."""
    if ranks == 1:
        listening.close()
        return SingleRankTransport()
    try:
        store = _meet(rank, listening=listening)
        return ProcessTransport(store, rank, ranks, device=device, deadline_s=DEADLINE_S)
    except (RuntimeError, OSError) as error:
        raise PeerFailedError(f"rendezvous failed: {error}") from None


def _meet(rank: int, *, listening: socket.socket) -> Store:
    """Open the store, on a socket that was bound before the fork."""
    if rank == 0:
        return serve_store(listening, DEADLINE_S)
    host, port = listening.getsockname()
    listening.close()
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
