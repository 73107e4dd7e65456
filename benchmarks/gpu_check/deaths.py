"""Ranks are killed or frozen in each phase of a step; the survivors train on in their processes.

Ranks are processes on all GPUs, or share the one that there is, by way of NCCL's sockets.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from benchmarks.gpu_check.setting import Setting, finish, share_gpu
from simulator.models.families import build_model
from simulator.models.layers import Precision
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from tests.worker.random_plan import any_interleaved_plan, any_plan
from worker.data.sources.open_data import open_data
from worker.devices.rank_device import set_up
from worker.distributed.interface import DeadlineError, PeerLostError, TransportError
from worker.distributed.process_groups import ProcessTransport
from worker.profiling.fault_injection import FailPoint, Milestone
from worker.profiling.timeline import Recorder
from worker.training.trainer import RankTrainer
from worker.types import Activity

KILLED_IN: tuple[Activity | Milestone, ...] = (
    *("met", "verified", "forward", "backward", "send", "receive"),
    *("sync", "wait", "vote", "step"),
)
FROZEN_IN: tuple[Activity, ...] = ("forward", "wait")
RANKS = 4
SECONDS, SECONDS_QUICK = 90.0, 15.0
"""Seconds after which no further death is tried."""
ANSWER_S = 45.0
"""Seconds after which a rank that does not answer counts as lost and is killed."""
DEADLINE_S, FROZEN_S = 30.0, 6.0
"""How long a rank waits for a peer: usually, and where a peer is frozen."""
STEPS = 3


@dataclass(frozen=True)
class Task:
    """One generation of a rank."""

    job: Job
    plan: Plan
    rank: int
    store: str
    dies: FailPoint | None
    is_frozen: bool


class _Rank:
    """A process that trains one generation after the other."""

    def __init__(self, context: Any, setting: Setting, slot: int) -> None:
        self.end, theirs = context.Pipe()
        self.generations = 0
        self.process = context.Process(target=_live, args=(theirs, setting, slot), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, task: Task) -> None:
        """Start a generation."""
        self.generations += 1
        self.end.send(task)

    def answer(self, deadline: float) -> Any:
        """Return what the rank says at the generation's end; ``None`` if it says nothing."""
        try:
            if self.end.poll(max(deadline - time.monotonic(), 0.0)):
                return self.end.recv()
        except (EOFError, ConnectionResetError):
            pass
        return None

    def end_it(self, *, tells_where: bool = False) -> None:
        """Kill the process; ``tells_where`` makes it write its stacks to the log first."""
        if tells_where and self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        self.process.kill()
        self.process.join()
        self.end.close()


def run(setting: Setting) -> dict[str, Any]:
    """Kill ranks until the time is over; count the outcomes of the survivors."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    job, draw = _job(setting), Random("deaths")
    until = time.monotonic() + (SECONDS_QUICK if setting.is_quick else SECONDS)
    cases = [(phase, False) for phase in KILLED_IN] + [(phase, True) for phase in FROZEN_IN]
    table: dict[str, Counter[str]] = {}
    seconds: dict[str, list[float]] = {"noticed": [], "closed": [], "next step": []}
    unexpected: list[str] = []
    ranks: dict[int, _Rank] = {}
    most = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(10**6):
            if time.monotonic() > until:
                break
            phase, is_frozen = cases[number % len(cases)]
            plan = _plan(draw, job, RANKS - number % 2)
            victim = draw.randrange(plan.device_count)
            step = 0 if phase in {"met", "verified"} else 1
            task = Task(
                job, plan, 0, f"{folder}/{number}", FailPoint(victim, phase, step), is_frozen
            )
            for slot in range(plan.device_count):
                ranks[slot] = ranks.get(slot) or _Rank(context, setting, slot)
            said = _generation(ranks, range(plan.device_count), task, victim, seconds)
            row = table.setdefault(f"frozen in {phase}" if is_frozen else phase, Counter())
            ranks.pop(victim).end_it()
            if said.pop(victim, None) is not None:
                row["has no such phase"] += 1
                continue
            row["deaths"] += 1
            for slot, answer in said.items():
                verdict = _verdict(answer, victim)
                row[verdict] += 1
                most = max(most, ranks[slot].generations)
                if verdict in {"lost", "replaced"}:
                    ranks.pop(slot).end_it(tells_where=True)
                if verdict not in {"recovered", "replaced"}:
                    unexpected.append(f"{phase}, {plan_text(plan)}, rank {victim}: {answer}"[:400])
            _next_generation(ranks, task, draw, f"{folder}/{number}-next", row, seconds, unexpected)
        for rank in ranks.values():
            rank.end_it()
    return {
        "ranks": f"up to {RANKS} on {max(torch.cuda.device_count(), 1)} device(s)",
        "deaths": {name: dict(row) for name, row in table.items()},
        "totals": dict(sum(table.values(), Counter())),
        "generations of one process": most,
        "seconds": {name: _spread(found) for name, found in seconds.items() if found},
        "unexpected": unexpected[:12],
    }


def _next_generation(
    ranks: dict[int, _Rank],
    dead: Task,
    draw: Random,
    store: str,
    row: Counter[str],
    seconds: dict[str, list[float]],
    unexpected: list[str],
) -> None:
    """Train the next generation with the surviving ranks."""
    slots = sorted(ranks)
    if not slots:
        return
    plan = _plan(draw, dead.job, len(slots))
    begin_s = time.monotonic()
    task = replace(dead, plan=plan, dies=None, is_frozen=False, store=store)
    said = _generation(ranks, slots, task, -1, {})
    seconds["next step"].append(time.monotonic() - begin_s)
    answers = list(said.values())
    good = all(each is not None and each.get("losses") for each in answers)
    row["went on" if good else "did not go on"] += 1
    if not good:
        unexpected.append(f"next generation, {plan_text(plan)}: {answers}"[:400])
        for slot in slots:
            ranks.pop(slot).end_it()


def _generation(
    ranks: dict[int, _Rank], slots: Any, task: Task, victim: int, seconds: dict[str, list[float]]
) -> dict[int, Any]:
    """Run one generation; return what each rank says, by its slot."""
    for rank, slot in enumerate(slots):
        ranks[slot].begin(replace(task, rank=rank))
    deadline = time.monotonic() + ANSWER_S
    said: dict[int, Any] = {}
    died_at = None
    if victim >= 0 and not task.is_frozen:
        # Wait until its process ends, or until it answers, since not every rank has each phase.
        wait([ranks[victim].process.sentinel, ranks[victim].end], ANSWER_S)
        died_at = time.time()
    for slot in slots:
        if slot == victim:
            continue
        answer = said[slot] = ranks[slot].answer(deadline)
        if answer is not None and died_at is not None and "noticed_at" in answer:
            seconds["noticed"].append(answer["noticed_at"] - died_at)
            seconds["closed"].append(answer["close_s"])
    if victim >= 0:
        said[victim] = ranks[victim].answer(time.monotonic() + 1.0)
    return said


def _verdict(answer: Any, victim: int) -> str:
    if answer is None:
        return "lost"
    if "failure" not in answer:
        return "noticed nothing"
    if answer["is_stuck"] or not answer["device_works"]:
        return "replaced"
    return "recovered" if answer["blames"] in {victim, None} else "blamed another"


def _spread(found: list[float]) -> str:
    ordered = sorted(found)
    return f"median {ordered[len(ordered) // 2]:.2f}, most {ordered[-1]:.2f}"


def plan_text(plan: Plan) -> str:
    """Return a plan in short: the TP degree of each stage, pipeline by pipeline."""
    pipelines = ("-".join(str(stage.tp) for stage in each.stages) for each in plan.pipelines)
    return f"{plan.schedule} {' | '.join(pipelines)}"


def _job(setting: Setting) -> Job:
    wide = 1 if setting.is_quick else 8
    model = build_model(
        "llama", layers=3, hidden=32 * wide, heads=4, kv_heads=4, ffn=64 * wide,
        vocab=64, sequence=16 * wide,
    )  # fmt: skip
    precision: Precision = "bf16" if setting.device == "cuda" else "fp32"
    return Job("deaths", model, global_batch=8, sequence=16 * wide, precision=precision, max_tp=4)


def _plan(draw: Random, job: Job, ranks: int) -> Plan:
    while True:
        plan = any_plan(draw, job, ranks_max=ranks)
        if draw.random() < 0.3:
            plan = any_interleaved_plan(draw, job, ranks_max=ranks) or plan
        if plan.device_count == ranks:
            return plan


# ---- a rank's process ---------------------------------------------------------------------------


class _Freezing(Recorder):
    """Freezes this process at the point where a plain recorder kills it."""

    def reached_point(self, place: Any) -> None:
        point = self.fail_at
        if point is not None and point.is_at(self.rank, place, self.step, self.generation):
            os.kill(os.getpid(), signal.SIGSTOP)


def _live(end: Connection, setting: Setting, slot: int) -> None:
    faulthandler.register(signal.SIGUSR1)  # Where it hangs, for the log.
    place = torch.device("cpu")
    if setting.device == "cuda":
        share_gpu(slot)
        place = torch.device("cuda", slot % torch.cuda.device_count())
    set_up(place)
    torch.set_num_threads(1) if place.type == "cpu" else None
    while True:
        end.send(_train(end.recv(), place))


def _train(task: Task, place: torch.device) -> dict[str, Any]:
    recorder = (_Freezing if task.is_frozen else Recorder)(task.rank, fail_at=task.dies)
    size = task.plan.device_count
    found: dict[str, Any] = {}
    transport: ProcessTransport | None = None
    try:
        transport = ProcessTransport(
            FileStore(task.store, size),
            task.rank,
            size,
            device=place,
            deadline_s=FROZEN_S if task.is_frozen else DEADLINE_S,
        )
        recorder.reached_point("met")
        data = open_data(task.job, Path())
        trainer = RankTrainer(
            task.job, task.plan, task.rank, transport, data, device=place, recorder=recorder
        )
        recorder.reached_point("verified")
        try:
            found["losses"] = [trainer.step().loss for _ in range(STEPS)]
        except TransportError:
            found["noticed_at"] = time.time()
            trainer.roll_forward()
            raise
        finally:
            trainer.close()
    except TransportError as error:
        found.setdefault("noticed_at", time.time())
        found["failure"] = f"{type(error).__name__}: {error}"[:200]
        found["blames"] = error.rank if isinstance(error, PeerLostError) else None
        if isinstance(error, DeadlineError) and transport is not None and transport.stall:
            found["blames"] = transport.stall.ranks[0]
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}"[:300]
        found["blames"] = -1
        if transport is not None:
            transport.abort(found["failure"])
    begin_s = time.perf_counter()
    if transport is not None:
        transport.close()
    found["close_s"] = time.perf_counter() - begin_s
    found["is_stuck"] = transport is not None and transport.is_stuck
    found["device_works"] = found["is_stuck"] or _works(place)
    return found


def _works(place: torch.device) -> bool:
    works = float(torch.ones(8, device=place).sum()) == 8
    finish(place)
    return works
