"""Ranks as processes that train a random plan until a fault is injected; who is blamed for it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import torch
from torch.distributed import FileStore

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from tests.worker.random_plan import any_plan
from tests.worker.training_runs import SomeLabels, small_job
from worker.distributed.backends import GlooBackends
from worker.distributed.interface import PeerLostError, TransportError
from worker.distributed.operations import OperationLog
from worker.distributed.process_groups import ProcessTransport
from worker.distributed.stalls import HangCause
from worker.layout.rank_layout import channels_of, rank_places, sync_buckets
from worker.layout.tensor_table import holdings_for
from worker.profiling.timeline import Recorder
from worker.training.precision import FP64
from worker.training.trainer import RankTrainer

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__, "tests.worker.rank_processes"])

Kind = Literal["stall", "frozen", "death", "slow link", "circle", "other order"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WARM_STEPS = 2
"""Steps before a fault; the second one counts the places where a rank may be hit."""
SLOW_S = 60.0
"""A slow link's delay; runs end before."""
PATIENCE_S = 45.0
"""The longest time for all ranks to name somebody, on a busy machine."""
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the ranks that are to be blamed for it."""

    kind: Kind
    ranks: tuple[int, ...]
    """Of a slow link its two ends; of the deadlocks the ranks that begin them."""
    share: float
    """Where in its step a rank is hit: 0 is the beginning."""


@dataclass(slots=True)
class Told:
    """What the ranks reported."""

    place: str = ""
    """What the rank that was hit did."""
    begun_s: float | None = None
    step_s: float = 0.0
    """The longest time of the step before."""
    blames: dict[int, tuple[tuple[int, ...], str, float]] = field(default_factory=dict)
    """By rank: whom it blamed first, in which words, and when."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the right ranks were blamed, by each rank's first verdict."""

    kind: str
    ranks: int
    place: str
    verdicts: int
    right: int
    exact: int
    """Voices that name no other rank."""
    named_s: float | None
    """From the fault to the first verdict."""
    allowed_s: float
    wrong: list[str]

    @property
    def is_right(self) -> bool:
        """Whether every rank named the right ones."""
        return self.verdicts > 0 and self.right == self.verdicts


def case(number: int) -> tuple[Job, Plan, Fault]:
    """Return the fault of this number, under a random plan."""
    draw = Random(f"hangs {number}")
    kind = KINDS[number % len(KINDS)]
    job = small_job(draw.choice(["gpt2", "llama"]))
    plan = any_plan(draw, job, ranks_max=6)
    while not _is_fit(job, plan, kind):
        plan = any_plan(draw, job, ranks_max=6)
    everybody = range(plan.device_count)
    match kind:
        case "slow link":
            ranks: tuple[int, ...] = draw.choice(channels_of(plan))
        case "circle":
            ranks = tuple(draw.sample(everybody, draw.randint(2, len(everybody))))
        case _:
            ranks = (draw.choice(everybody),)
    return job, plan, Fault(kind, ranks, draw.random())


def _is_fit(job: Job, plan: Plan, kind: Kind) -> bool:
    """Return whether a plan has what a fault of this kind needs."""
    everybody = tuple(range(plan.device_count))
    if kind == "slow link":
        return bool(channels_of(plan))
    if kind == "other order":
        # The collective out of turn must not be taken for one of the step's own.
        places = rank_places(plan)
        parts = sync_buckets(holdings_for(plan, job))
        return everybody not in {p.tp_ranks for p in places} | {part.ranks for part in parts}
    return len(everybody) > 1


def judge(fault: Fault, size: int, told: Told) -> Verdict:
    """Compare whom the ranks blame with who is to be blamed."""
    wanted, right, exact, wrong = set(fault.ranks), 0, 0, []
    for rank, (blamed, text, _) in sorted(told.blames.items()):
        match fault.kind:
            case "stall":
                is_right = blamed == fault.ranks and f"({told.place})" in text
            case "frozen" | "death":
                is_right = blamed == fault.ranks
            case "slow link":
                is_right = wanted <= set(blamed) and "the link between them is slow" in text
            case "circle":
                is_right = set(blamed) == wanted
            case "other order":
                # The rank and those that it waits for, who wait for it.
                is_right = wanted <= set(blamed) and "wait for each other" in text
        right += is_right
        exact += is_right and set(blamed) == wanted
        wrong += [] if is_right else [f"rank {rank}: {text}"]
    at_s = min((each[2] for each in told.blames.values()), default=None)
    begun_s = told.begun_s
    named_s = None if at_s is None or begun_s is None else at_s - begun_s
    allowed_s = max(3.0, 2 * told.step_s)
    verdicts = len(told.blames)
    return Verdict(fault.kind, size, told.place, verdicts, right, exact, named_s, allowed_s, wrong)


# -- the driver ------------------------------------------------------------------------------------


def run_fault(number: int) -> Verdict:
    """Inject one fault; return who was blamed."""
    job, plan, fault = case(number)
    told, size = Told(), plan.device_count
    until: list[float] = []
    hit = set(fault.ranks) if fault.kind in {"stall", "frozen", "death"} else set()
    wanted = size - len(hit)
    with _ranks(size, _be_faulty, job, plan, fault) as said:
        for rank, message in said(lambda: min(until, default=None)):
            match message:
                case ("begun", str(place), float(at_s), float(step_s)):
                    told.place, told.begun_s = place, min(at_s, told.begun_s or at_s)
                    told.step_s = max(told.step_s, step_s)
                    until.append(told.begun_s + PATIENCE_S)
                case ("blames", blamed, str(text), float(at_s)) if rank not in hit:
                    told.blames.setdefault(rank, (tuple(blamed), text, at_s))
            if len(told.blames) == wanted:
                break
    return judge(fault, size, told)


@dataclass(frozen=True, slots=True)
class Clean:
    """Steps without a fault."""

    ranks: int
    steps: int
    alarms: list[str]
    longest_wait_s: float
    """The longest wait for one operation."""


def run_clean(number: int, steps: int) -> Clean:
    """Train without a fault; return who was blamed all the same."""
    draw = Random(f"clean {number}")
    job = small_job(draw.choice(["gpt2", "llama"]), global_batch=4)
    plan = any_plan(draw, job, ranks_max=3)
    while plan.device_count == 1:
        plan = any_plan(draw, job, ranks_max=3)
    alarms, waits, done = [], [0.0], 0
    with _ranks(plan.device_count, _be_clean, job, plan, steps) as said:
        for rank, message in said(lambda: None):
            match message:
                case ("blames", _, str(text), float()):
                    alarms.append(f"rank {rank}: {text}")
                case ("done", float(longest_s)):
                    waits.append(longest_s)
                    done += 1
    assert done == plan.device_count, f"only {done} ranks of {plan.device_count} ended"
    return Clean(plan.device_count, steps, alarms, max(waits))


Said = Callable[[Callable[[], float | None]], Iterator[tuple[int, Any]]]


@contextlib.contextmanager
def _ranks(size: int, body: Callable[..., None], *args: Any) -> Iterator[Said]:
    """Run ranks as processes; at the end they are killed, whatever they do."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        processes, ends = [], {}
        for rank in range(size):
            end, theirs = _CONTEXT.Pipe(duplex=False)
            arguments = (theirs, rank, size, path, body, args)
            processes.append(_CONTEXT.Process(target=_be, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            ends[end] = rank

        def said(give_up_s: Callable[[], float | None]) -> Iterator[tuple[int, Any]]:
            while ends:
                until_s = give_up_s()
                ready = wait(list(ends), None if until_s is None else until_s - time.monotonic())
                if not ready:
                    return
                for end in ready:
                    assert isinstance(end, Connection)
                    try:
                        message = end.recv()
                    except EOFError:
                        end.close()
                        del ends[end]
                    else:
                        yield ends[end], message

        try:
            yield said
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(30)
            for end in ends:
                end.close()


# -- the ranks -------------------------------------------------------------------------------------


def _be(
    end: Connection, rank: int, size: int, path: str, body: Callable[..., None], args: Any
) -> None:
    torch.set_num_threads(1)
    lock = threading.Lock()

    def say(*message: Any) -> None:
        with lock:
            end.send(message)

    body(rank, size, FileStore(path, size), say, *args)
    end.close()


def _connected(
    rank: int, size: int, store: FileStore, say: Callable[..., None], **options: Any
) -> ProcessTransport:
    transport = ProcessTransport(store, rank, size, deadline_s=DEADLINE_S, **options)

    def tell(blame: HangCause) -> None:
        say("blames", blame.ranks, blame.text, time.monotonic())

    transport.on_stall = tell
    return transport


def _be_faulty(
    rank: int,
    size: int,
    store: FileStore,
    say: Callable[..., None],
    job: Job,
    plan: Plan,
    fault: Fault,
) -> None:
    """Train until the fault, and tell whom this rank blames."""
    recorder = _Hit(rank, fault, say)
    options = {}
    if fault.kind == "slow link" and rank in fault.ranks:
        options["backends"] = _SlowGloo(recorder, fault.ranks, size)
    transport = _connected(rank, size, store, say, **options)
    transport.activity = lambda: recorder.activity_text
    recorder.transport = transport
    try:
        trainer = RankTrainer(
            job, plan, rank, transport, SomeLabels(job), precision=FP64, recorder=recorder
        )
        while True:
            recorder.step_s = trainer.step().seconds
            transport.expect_steps(recorder.step_s)
    except TransportError as failure:
        lost = (failure.rank,) if isinstance(failure, PeerLostError) else ()
        say("blames", lost, str(failure), time.monotonic())


def _be_clean(
    rank: int,
    size: int,
    store: FileStore,
    say: Callable[..., None],
    job: Job,
    plan: Plan,
    steps: int,
) -> None:
    """Train; tell whom this rank blames, and for how long it waited."""
    recorder = Recorder(rank)
    transport = _connected(rank, size, store, say)
    transport.activity = lambda: recorder.activity_text
    trainer = RankTrainer(
        job, plan, rank, transport, SomeLabels(job), precision=FP64, recorder=recorder
    )
    transport.expect_steps(trainer.step().seconds)
    transport.operations = watch = _Watch(transport.operations)
    for _ in range(steps - 1):
        transport.expect_steps(trainer.step().seconds)
    say("done", watch.longest_s)
    transport.close()


class _Watch(OperationLog):
    """Keeps the longest wait."""

    def __init__(self, log: OperationLog) -> None:
        super().__init__(keeps_unfinished=False)
        self.counts, self.members, self.longest_s = log.counts, log.members, 0.0

    def end_wait(self) -> None:
        if self._waiting is not None:
            self.longest_s = max(self.longest_s, time.monotonic() - self._waiting.begun_s)
        super().end_wait()


class _Hit(Recorder):
    """Hits its rank at one place of its step."""

    def __init__(self, rank: int, fault: Fault, say: Callable[..., None]) -> None:
        super().__init__(rank)
        self.fault, self._say = fault, say
        self.transport: ProcessTransport | None = None
        self.step_s = 0.0
        self._places = self._place = 0

    @property
    def is_on(self) -> bool:
        """Whether the fault has begun."""
        return self.step >= WARM_STEPS

    def at_step(self, step: int) -> None:
        super().at_step(step)
        if not self.is_on or self.rank not in self.fault.ranks or self.transport is None:
            return
        if self.fault.kind == "circle":
            # Each waits for the next one, who never sends.
            ranks = self.fault.ranks
            following = ranks[(ranks.index(self.rank) + 1) % len(ranks)]
            self.begun()
            self.transport.receive(torch.zeros(1), source=following).wait()
        elif self.fault.kind == "other order":
            # A collective that the others do not start before their step.
            self.begun()
            self.transport.group(tuple(range(self.transport.size))).all_reduce(torch.zeros(1))

    def begun(self) -> None:
        """Tell that the fault begins."""
        self._say("begun", self.activity_text, time.monotonic(), self.step_s)

    def reached_point(self, place: Any) -> None:  # noqa: ARG002 - the place is where it is counted
        if self.step == WARM_STEPS - 1:
            self._places += 1
        if not self.is_on or self.rank not in self.fault.ranks:
            return
        self._place += 1
        if self._place != 1 + int(self.fault.share * self._places):
            return
        match self.fault.kind:
            case "stall":
                self.begun()
                threading.Event().wait()
            case "frozen":
                self.begun()
                os.kill(os.getpid(), signal.SIGSTOP)
            case "death":
                self.begun()
                os.kill(os.getpid(), signal.SIGKILL)


class _SlowGloo(GlooBackends):
    """Gloo with one slow link, at one of its ends."""

    def __init__(self, recorder: _Hit, ends: Sequence[int], size: int) -> None:
        super().__init__("127.0.0.1", DEADLINE_S)
        self.recorder, self.ends, self.size = recorder, ends, size

    def open(self, name: str, store: Any, index: int, size: int) -> Any:
        group = super().open(name, store, index, size)
        members = range(self.size) if name == "all" else [int(each) for each in name.split("-")]
        has_link = set(self.ends) <= set(members)
        return _SlowGroup(group, self.recorder, self.ends) if has_link else group


class _SlowGroup:
    """A group whose operations over the link begin late; those of one thread run in order."""

    def __init__(self, group: Any, recorder: _Hit, ends: Sequence[int]) -> None:
        self._group, self._recorder = group, recorder
        self._other = next(each for each in ends if each != recorder.rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, data: Any, peer: int, tag: int) -> Any:
        if peer != self._other:
            return self._group.send(data, peer, tag)
        return self._later(lambda: self._group.send(data, peer, tag))

    def allreduce(self, *args: Any) -> Any:
        return self._later(lambda: self._group.allreduce(*args))

    def reduce(self, *args: Any) -> Any:
        return self._later(lambda: self._group.reduce(*args))

    def broadcast(self, *args: Any) -> Any:
        return self._later(lambda: self._group.broadcast(*args))

    def _later(self, begin: Callable[[], Any]) -> Any:
        if not self._recorder.is_on:
            return begin()
        self._recorder.begun()
        return _Late()


class _Late:
    """An operation that takes longer than the run."""

    def wait(self) -> None:
        time.sleep(SLOW_S)

    def is_completed(self) -> bool:
        return False
