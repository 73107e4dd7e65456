"""NCCL (gloo on CPUs) as the runtime uses it: one rank, all devices, and after a kill -9."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, FileStore, HashStore

from benchmarks.gpu_check.model import llama_job, plan_for
from benchmarks.gpu_check.setting import (
    Setting,
    SkippedError,
    attempt,
    finish,
    seconds_of,
    share_gpu,
)
from worker.data.sources.open_data import open_data
from worker.devices.rank_device import set_up
from worker.distributed.backends import NcclBackends
from worker.distributed.interface import Collective, PeerLostError, TransportError
from worker.distributed.process_groups import ProcessTransport
from worker.training.trainer import RankTrainer

RANKS_ON_ONE = 3
"""Ranks that share one device, or the CPU."""
RANKS_MOST = 8
WITHIN_S = 75.0
"""Seconds after which ranks that do not answer are killed, and named."""


def run(setting: Setting) -> dict[str, Any]:
    """Check one rank in this process, then all devices in processes of their own."""
    return {
        "one_rank": attempt(lambda: _one_rank(setting)),
        "all_ranks": attempt(lambda: _all_ranks(setting)),
    }


def _one_rank(setting: Setting) -> dict[str, Any]:
    if setting.device != "cuda":
        raise SkippedError("NCCL needs a GPU")
    place = setting.place
    free, _ = torch.cuda.mem_get_info(place)
    library = NcclBackends(place, "127.0.0.1", 30.0)
    begin_s = time.perf_counter()
    group = library.open("one", HashStore(), 0, 1)
    one = torch.ones(2**20, device=place)
    group.allreduce([one], AllreduceOptions()).wait()
    finish(place)
    found: dict[str, Any] = {
        "communicator_s": time.perf_counter() - begin_s,
        "sum_is_right": bool((one == 1).all()),
        "communicator_mib": (free - torch.cuda.mem_get_info(place)[0]) / 2**20,
    }
    begin_s = time.perf_counter()
    for thread in library.abort([group]):
        thread.join(20)
        found["abort_returns"] = not thread.is_alive()
    found["abort_s"] = time.perf_counter() - begin_s
    found["device_works_after_an_abort"] = float((one + 1).sum()) == 2 * one.numel()
    return found


def _all_ranks(setting: Setting) -> dict[str, Any]:
    devices = torch.cuda.device_count() if setting.device == "cuda" else 1
    count = min(devices, RANKS_MOST) if devices > 1 else RANKS_ON_ONE
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(count):
            end, theirs = context.Pipe(duplex=False)
            arguments = (theirs, setting, rank, count, f"{folder}/store")
            processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(end)
        deadline = time.monotonic() + WITHIN_S
        told = [_receive(end, deadline) for end in ends]
        for process in processes:
            process.kill() if process.is_alive() else None
            process.join()
    killed = count - 1
    found: dict[str, Any] = {
        "ranks": count,
        "devices": devices,
        **(told[0] if isinstance(told[0], dict) else {}),
    }
    found["survivors_say"] = [
        rank.get("after_the_kill") if isinstance(rank, dict) else rank for rank in told[:killed]
    ]
    return found


def _receive(end: Connection, deadline: float) -> Any:
    """Return a rank's last message."""
    last: Any = "no message from this rank"
    try:
        while end.poll(max(deadline - time.monotonic(), 0.0)):
            last = end.recv()
    except EOFError:
        pass
    return last


def _rank(end: Connection, setting: Setting, rank: int, count: int, path: str) -> None:
    place = torch.device("cpu")
    if setting.device == "cuda":
        share_gpu(rank)
        place = torch.device("cuda", rank % torch.cuda.device_count())
    set_up(place)
    torch.set_num_threads(1) if place.type == "cpu" else None
    store, everybody = FileStore(path, count), tuple(range(count))
    said: dict[str, Any] = {}
    begin_s = time.perf_counter()
    transport = ProcessTransport(store, rank, count, device=place, deadline_s=60.0)
    pairs = [(a, b) for a in everybody for b in everybody if abs(a - b) == 1]
    transport.open([everybody], sorted(pairs))
    said["connect_s"] = time.perf_counter() - begin_s
    group = transport.group(everybody)
    rates = {}
    for size in [2**14] if setting.is_quick else [2**18, 2**24]:
        values = torch.ones(size, device=place)
        took_s = seconds_of(partial(group.all_reduce, values), place, setting.rounds)
        # The bytes that each rank of a ring sends.
        rates[f"{4 * size // 2**10} KiB"] = 2 * (count - 1) / count * 4 * size / took_s / 1e9
    said["all_reduce_gbytes_per_s"] = rates
    said["gathers_and_sums_of_parts_are_right"] = _parts_are_right(group, place)
    end.send(said)
    transport.close()
    plans: dict[str, dict[str, Any]] = {
        "two_stages_1f1b": {"stages": 2, "schedule": "1f1b"},
        "two_stages_gpipe": {"stages": 2, "schedule": "gpipe"},
        "two_ranks_split_layers": {"tp": 2},
        "two_ranks_share_tokens": {"tp": 2, "sequence_parallel": True},
    }
    for name, shape in plans.items():
        said[name] = attempt(partial(_two_ranks, setting, store, rank, place, name, shape))
        end.send(said)
    said["after_the_kill"] = _kill(store, rank, count, place)
    end.send(said)
    end.close()


def _parts_are_right(group: Collective, place: torch.device) -> bool:
    """Gather each rank's number, and sum a part for each rank."""
    everybody = torch.arange(group.size, dtype=torch.float32, device=place)
    gathered = group.all_gather(everybody[group.index : group.index + 1])
    own = group.reduce_scatter(everybody[:, None] + torch.ones(2, device=place))
    wanted = float(group.size * (group.index + 1))
    return bool((gathered[:, 0] == everybody).all() and (own == wanted).all())


def _two_ranks(
    setting: Setting,
    store: Any,
    rank: int,
    place: torch.device,
    generation: str,
    shape: dict[str, Any],
) -> Any:
    """Train a plan of two ranks on the first two."""
    if rank > 1:
        return None
    job = llama_job(setting, layers=4, max_tp=2)
    plan = plan_for(setting, job, **shape)
    transport = ProcessTransport(
        store, rank, 2, generation=generation, device=place, deadline_s=60.0
    )
    trainer = RankTrainer(job, plan, rank, transport, open_data(job, Path()), device=place)
    reports = [trainer.step() for _ in range(4)]
    transport.close()
    return {"step_s": min(report.seconds for report in reports), "loss": reports[-1].loss}


def _kill(store: Any, rank: int, count: int, place: torch.device) -> dict[str, Any]:
    """The last rank is killed while the others wait for it in a collective; they go on."""
    everybody = tuple(range(count))
    transport = ProcessTransport(
        store, rank, count, generation="kill", device=place, deadline_s=60.0
    )
    transport.open([everybody], [])
    group = transport.group(everybody)
    if rank == count - 1:
        time.sleep(1.0)  # The others wait by then.
        store.set("killed at", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    found: dict[str, Any] = {}
    try:
        group.all_reduce(torch.ones(2**20, device=place))
        finish(place)
        transport.check()
        found["noticed"] = "nothing"
    except TransportError as error:
        found["noticed_s"] = time.time() - float(store.get("killed at"))
        found["names_the_killed_rank"] = isinstance(error, PeerLostError) and error.rank == rank_of(
            count
        )
    begin_s = time.perf_counter()
    transport.close()
    found["close_s"] = time.perf_counter() - begin_s
    found["process_can_go_on"] = not transport.is_stuck
    found["device_works"] = float(torch.ones(8, device=place).sum()) == 8
    if count > 2:
        begin_s = time.perf_counter()
        transport = ProcessTransport(
            store, rank, count - 1, generation="after", device=place, deadline_s=60.0
        )
        rest = everybody[:-1]
        transport.open([rest], [])
        total = transport.group(rest).all_reduce(torch.ones(4, device=place))
        found["next_generation_s"] = time.perf_counter() - begin_s
        found["next_sum_is_right"] = float(total[0]) == len(rest)
        transport.close()
    return found


def rank_of(count: int) -> int:
    """Return the rank that is killed."""
    return count - 1
