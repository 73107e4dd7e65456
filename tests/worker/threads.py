"""All ranks of a plan as threads of one process.

The last rank to arrive reduces in the order of the group, so results are bit-equal in every run.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from worker.distributed.interface import (
    AbortedError,
    Collective,
    DeadlineError,
    PeerLostError,
    PendingOperation,
    Reduction,
    TransportError,
    VoteRecord,
)

Result = TypeVar("Result")


class _Wait:
    """Ends when its event is set, or when the world fails."""

    def __init__(self, world: ThreadWorld, what: str) -> None:
        self.done = threading.Event()
        self._world = world
        self._what = what

    def wait(self) -> None:
        if not self.done.wait(self._world.deadline_s):
            raise DeadlineError(self._what, seconds=self._world.deadline_s)
        failure = self._world.failure
        if failure is not None:
            raise failure

    def is_done(self) -> bool:
        return self.done.is_set()


class _PendingCollective(_Wait):
    """One collective with what the ranks that have arrived contribute."""

    def __init__(self, world: ThreadWorld, size: int, what: str) -> None:
        super().__init__(world, what)
        self.parts: list[Any] = [None] * size


class ThreadWorld:
    """The state that the threads share: messages and pending collectives."""

    def __init__(self, size: int, *, deadline_s: float = 60.0) -> None:
        self.size = size
        self.deadline_s = deadline_s
        self.failure: TransportError | None = None
        self.votes: dict[int, VoteRecord] = {}
        self.last_votes: list[VoteRecord] = []
        """The votes recorded when the world failed."""
        self._lock = threading.Lock()
        self._sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._wanted: dict[tuple[int, int], deque[tuple[Tensor, _Wait]]] = defaultdict(deque)
        self._collectives: dict[tuple[tuple[int, ...], int], _PendingCollective] = {}

    def transport(self, rank: int) -> ThreadTransport:
        """Return the transport of one rank."""
        return ThreadTransport(self, rank)

    def fail(self, failure: TransportError) -> None:
        """End every wait of every rank; all of them see the first failure."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
                lost = failure.rank if isinstance(failure, PeerLostError) else None
                self.last_votes = [vote for rank, vote in self.votes.items() if rank != lost]
            for collective in self._collectives.values():
                collective.done.set()
            for wanted in self._wanted.values():
                for _, wait in wanted:
                    wait.done.set()

    def send(self, tensor: Tensor, *, source: int, to: int) -> None:
        with self._lock:
            self._raise_failure()
            if self._wanted[source, to]:
                target, wait = self._wanted[source, to].popleft()
                target.copy_(tensor)
                wait.done.set()
            else:
                self._sent[source, to].append(tensor.clone())

    def receive(self, tensor: Tensor, *, source: int, to: int) -> PendingOperation:
        wait = _Wait(self, f"receiving from rank {source}")
        with self._lock:
            self._raise_failure()
            if self._sent[source, to]:
                tensor.copy_(self._sent[source, to].popleft())
                wait.done.set()
            else:
                self._wanted[source, to].append((tensor, wait))
        return wait

    def join(
        self,
        ranks: tuple[int, ...],
        number: int,
        *,
        index: int,
        part: Any,
        finish: Callable[[list[Any]], None],
    ) -> PendingOperation:
        """Contribute a part; the last rank to arrive runs the operation for all."""
        with self._lock:
            self._raise_failure()
            what = f"a collective of ranks {ranks}"
            collective = self._collectives.setdefault(
                (ranks, number), _PendingCollective(self, len(ranks), what)
            )
            assert collective.parts[index] is None, "a rank took part twice in one collective"
            collective.parts[index] = part
            parts = [each for each in collective.parts if each is not None]
            if len(parts) < len(ranks):
                return collective
            del self._collectives[ranks, number]
        # All other ranks are waiting, so their tensors may be written without the lock.
        finish(parts)
        collective.done.set()
        return collective

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


class ThreadCollective(Collective):
    """One rank's view of a group of threads."""

    def __init__(self, world: ThreadWorld, ranks: tuple[int, ...], rank: int) -> None:
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self._world = world
        self._ranks = ranks
        self._number = 0

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> PendingOperation:
        return self._start(tensor.detach(), lambda tensors: _reduce(tensors, op))

    def start_reduce(self, tensor: Tensor, *, target: int) -> PendingOperation:
        return self._start(tensor.detach(), lambda tensors: _reduce_to(tensors, target))

    def start_broadcast(self, tensor: Tensor, *, source: int) -> PendingOperation:
        return self._start(tensor.detach(), lambda tensors: _copy(tensors, source))

    def start_all_gather(self, tensor: Tensor, *, into: Tensor) -> PendingOperation:
        return self._start((tensor.detach(), into.detach()), _gather)

    def start_reduce_scatter(self, parts: Tensor, *, into: Tensor) -> PendingOperation:
        return self._start((parts.detach(), into.detach()), _scatter)

    def _start(self, part: Any, finish: Callable[[list[Any]], None]) -> PendingOperation:
        self._number += 1
        return self._world.join(
            self._ranks, self._number, index=self.index, part=part, finish=finish
        )


class ThreadTransport:
    """One rank's transport to the other threads."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.requests_early = True
        self.is_stuck = False
        self._world = world
        self._groups: dict[tuple[int, ...], ThreadCollective] = {}

    def open(self, groups: Sequence[tuple[int, ...]], channels: Sequence[tuple[int, int]]) -> None:
        """Threads need no connections."""

    def group(self, ranks: tuple[int, ...]) -> ThreadCollective:
        if ranks not in self._groups:
            self._groups[ranks] = ThreadCollective(self._world, ranks, self.rank)
        return self._groups[ranks]

    def send(self, tensor: Tensor, *, to: int) -> PendingOperation:
        self._world.send(tensor.detach(), source=self.rank, to=to)
        done = _Wait(self._world, f"sending to rank {to}")
        done.done.set()
        return done

    def receive(self, tensor: Tensor, *, source: int) -> PendingOperation:
        return self._world.receive(tensor.detach(), source=source, to=self.rank)

    def check(self) -> None:
        if self._world.failure is not None:
            raise self._world.failure

    def record_vote(self, vote: VoteRecord) -> None:
        self._world.votes[self.rank] = vote

    def last_votes(self, wait_s: float) -> list[VoteRecord]:  # noqa: ARG002 - all is known at once
        return self._world.last_votes

    def abort(self, reason: str) -> None:
        self._world.fail(AbortedError(reason, rank=self.rank))

    def close(self) -> None:
        self._groups.clear()


def _reduce(tensors: list[Tensor], op: Reduction) -> None:
    with torch.no_grad():
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            if op == "sum":
                total += tensor
            else:
                torch.maximum(total, tensor, out=total)
        for tensor in tensors:
            tensor.copy_(total)


def _reduce_to(tensors: list[Tensor], target: int) -> None:
    _reduce(tensors, "sum")
    for index, tensor in enumerate(tensors):
        if index != target:
            tensor.fill_(torch.nan)  # Libraries leave parts of the sum there.


def _copy(tensors: list[Tensor], source: int) -> None:
    for index, tensor in enumerate(tensors):
        if index != source:
            tensor.copy_(tensors[source])


def _gather(parts: list[tuple[Tensor, Tensor]]) -> None:
    for _, into in parts:
        torch.stack([tensor for tensor, _ in parts], out=into)


def _scatter(parts: list[tuple[Tensor, Tensor]]) -> None:
    for index, (_, into) in enumerate(parts):
        torch.sum(torch.stack([tensor[index] for tensor, _ in parts]), 0, out=into)


def run_as_threads(
    size: int, body: Callable[[ThreadTransport], Result], *, deadline_s: float = 60.0
) -> list[Result]:
    """Run ``body`` in one thread per rank and return the results by rank.

    If one fails, the others are aborted and the first failure is raised.
    """
    world = ThreadWorld(size, deadline_s=deadline_s)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(world.transport(rank))
        except BaseException as failure:
            failures.append(failure)
            world.fail(AbortedError(f"{type(failure).__name__}: {failure}", rank=rank))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
