"""Groups with NCCL's rules, between threads on CPUs: the whole runtime runs over them.

A rank is a thread, and stands for its GPU's stream as well: where a kernel would keep the stream
waiting, the thread waits. The rules:

- A group's communicator is made by its first operation, or when it is told to connect. That blocks
  the host until all members do so, and nothing interrupts it.
- The operations of a communicator run in order. A send ends when it is received.
- A wait does not raise, unless torch has noticed before that the connection to a lost peer closed
  (``World.notices``). What was aborted ends like what was completed; its result is nonsense or what
  the tensor held before.
- An abort ends the kernels of its own communicator, then waits until the device has no other
  unfinished kernel.
- After an error or a timeout the watchdog ends the process, unless the environment forbids it. If
  so, it sleeps four times as long as a dump may take, and who closes the group waits for it.
- A thread that does not say which device it uses makes a context on device 0.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp, Store

from worker.distributed.backends import at_once, prepare_environment
from worker.distributed.operations import StartedOperation

NONSENSE = 7.25
"""What an aborted operation may leave behind."""
_POLL_S = 0.0005
GIVE_UP_S = 60.0
"""A test ends although a rule of NCCL would keep it forever."""


class HangError(AssertionError):
    """By NCCL's rules this would never end."""


@dataclass(eq=False)
class Device:
    """One rank's GPU, and the process that uses it."""

    rank: int
    is_dead: bool = False
    was_killed: bool = False
    """The watchdog has ended the process."""
    hangs: bool = False
    """An abort would wait forever."""
    unfinished: set[_Work] = field(default_factory=set)
    threads: set[int] = field(default_factory=set)
    """Those that have said which device they use."""
    contexts_elsewhere: list[str] = field(default_factory=list)

    def synchronize(self) -> None:
        """Wait for all that was started on the device, in any communicator."""
        for work in tuple(self.unfinished):
            work.wait()


@dataclass(eq=False)
class _Communicator:
    """What the members of a group share once it is made."""

    size: int
    members: dict[int, Device] = field(default_factory=dict)
    calls: dict[tuple[Any, ...], dict[int, _Work]] = field(
        default_factory=lambda: defaultdict(dict)
    )


class World:
    """All devices, and the communicators between them."""

    def __init__(self, *, leaves: float | None = NONSENSE, notices: bool = False) -> None:
        """``leaves``: what an aborted operation fills its tensor with; ``None``: nothing.

        ``notices``: torch has noticed each lost peer before a wait for it returns, as it may where
        peers are connected by sockets.
        """
        self.leaves, self.notices = leaves, notices
        self.lock = threading.RLock()
        self.communicators: dict[str, _Communicator] = {}
        self.devices: list[Device] = []

    def device(self, rank: int) -> Device:
        found = Device(rank)
        self.devices.append(found)
        return found


@dataclass(eq=False)
class _Work:
    """One kernel in a communicator's queue."""

    group: Group
    key: tuple[Any, ...]
    tensor: Tensor
    run: Callable[[dict[int, _Work]], None]
    needed: int
    before: _Work | None
    given: Tensor | None = None
    """What it reads, if that is not the tensor that it writes."""
    is_over: bool = False

    def advance(self) -> None:
        """Run if all that this one waits for has come; called by anybody."""
        with self.group.world.lock:
            if self.is_over or self.group.is_aborted:
                return
            calls = self.group.communicator.calls[self.key]
            if len(calls) < self.needed:
                return
            if any(each.group.device.is_dead for each in calls.values()):
                return
            if any(before is not None and not before.is_over for before in _before(calls)):
                return
            self.run(calls)
            for each in calls.values():
                each.finish()
            del self.group.communicator.calls[self.key]

    def finish(self) -> None:
        self.is_over = True
        self.group.device.unfinished.discard(self)

    def is_completed(self) -> bool:
        self.group._enter()
        if self.before is not None and self.before.is_completed():
            self.before = None
        self.advance()
        return self.is_over

    def wait(self) -> None:
        """Keep the stream, which is this thread, waiting."""
        deadline = time.monotonic() + GIVE_UP_S
        while not self.is_completed():
            if self.group.device.is_dead:
                raise SystemExit
            if time.monotonic() > deadline:
                raise HangError(f"{self.key} waits forever")
            time.sleep(_POLL_S)
        if self.group.is_aborted:
            self.group.watchdog()  # It has seen the error before our monitor did.
            if self.group.world.notices and self.group.has_lost_peer():
                raise RuntimeError("NCCL error: remote process exited or there was a network error")


class Group:
    """One member's handle, with the methods of torch's ProcessGroupNCCL."""

    def __init__(self, world: World, device: Device, name: str, index: int, size: int) -> None:
        self.world, self.device, self._name = world, device, name
        self._index, self._size = index, size
        self.is_aborted = False
        self.communicator: Any = None
        self._last: _Work | None = None
        self._counts: dict[Any, int] = defaultdict(int)

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return self._size

    def eager_connect_single_device(self, _: Any = None) -> None:
        """Make the communicator: every member must do so, and a dead one never does."""
        self._enter()
        with self.world.lock:
            made = self.world.communicators.setdefault(self._name, _Communicator(self._size))
            made.members[self._index] = self.device
        deadline = time.monotonic() + GIVE_UP_S
        while len(made.members) < self._size:
            if self.device.is_dead:
                raise SystemExit
            if time.monotonic() > deadline:
                raise HangError(f"making {self._name} waits forever")
            time.sleep(_POLL_S)
        self.communicator = made

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        def run(calls: dict[int, _Work]) -> None:
            _reduce(calls, options)

        return self._start(("all-reduce",), tensors[0], run, self._size)

    def reduce(self, tensors: list[Tensor], options: Any) -> _Work:
        def run(calls: dict[int, _Work]) -> None:
            given = {index: call.tensor.clone() for index, call in calls.items()}
            _reduce(calls, options)
            for index in set(calls) - {options.rootRank}:
                calls[index].tensor.copy_(given[index])

        return self._start(("reduce",), tensors[0], run, self._size)

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Work:
        def run(calls: dict[int, _Work]) -> None:
            for index, call in calls.items():
                if index != options.rootRank:
                    call.tensor.copy_(calls[options.rootRank].tensor)

        return self._start(("broadcast",), tensors[0], run, self._size)

    def _allgather_base(self, into: Tensor, tensor: Tensor) -> _Work:
        def run(calls: dict[int, _Work]) -> None:
            parts = [calls[index].given for index in range(self._size)]
            for call in calls.values():
                torch.cat(parts, out=call.tensor)

        return self._start(("all-gather",), into, run, self._size, given=tensor)

    def _reduce_scatter_base(self, into: Tensor, parts: Tensor) -> _Work:
        def run(calls: dict[int, _Work]) -> None:
            total = sum(calls[index].given for index in range(self._size))
            for index, call in calls.items():
                call.tensor.copy_(total[index])

        return self._start(("reduce-scatter",), into, run, self._size, given=parts)

    def send(self, tensors: list[Tensor], peer: int, _: int) -> _Work:
        return self._start(("transfer", self._index, peer), tensors[0], _transfer, 2)

    def recv(self, tensors: list[Tensor], peer: int, _: int) -> _Work:
        return self._start(("transfer", peer, self._index), tensors[0], _transfer, 2)

    def abort(self) -> None:
        """End this communicator's kernels, then wait until the device is idle."""
        self._enter()
        self.is_aborted = True
        with self.world.lock:
            for work in [each for each in self.device.unfinished if each.group is self]:
                if self.world.leaves is not None:
                    work.tensor.fill_(self.world.leaves)
                work.finish()
        deadline = time.monotonic() + GIVE_UP_S
        while self.device.unfinished and not self.device.is_dead:
            if time.monotonic() > deadline:
                self.device.hangs = True  # In truth it would not return.
                return
            time.sleep(_POLL_S)
        if self.has_lost_peer():
            dump_s = float(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")) / 1e3
            time.sleep(min(4 * dump_s, 2 * GIVE_UP_S))

    def shutdown(self) -> None:
        self._enter()

    def _start(
        self,
        kind: tuple[Any, ...],
        tensor: Tensor,
        run: Any,
        needed: int,
        *,
        given: Tensor | None = None,
    ) -> _Work:
        if self.communicator is None:
            self.eager_connect_single_device()
        self._enter()
        self.watchdog()
        self._counts[kind] += 1
        key = (*kind, self._counts[kind])
        work = _Work(self, key, tensor, run, needed, self._last, given)
        with self.world.lock:
            if self.is_aborted:
                work.is_over = True
                return work
            self.device.unfinished.add(work)
            self.communicator.calls[key][self._index] = work
            self._last = work
        work.advance()
        return work

    def _enter(self) -> None:
        here = threading.get_ident()
        if here not in self.device.threads:
            self.device.contexts_elsewhere.append(threading.current_thread().name)

    def has_lost_peer(self) -> bool:
        """Return whether a member of the communicator is dead."""
        made = self.communicator
        return made is not None and any(each.is_dead for each in made.members.values())

    def watchdog(self) -> None:
        """By default torch ends the process when a peer of the communicator is gone."""
        handles = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        if handles and self.has_lost_peer():
            self.device.was_killed = self.device.is_dead = True
            raise SystemExit


def _before(calls: dict[int, _Work]) -> list[_Work | None]:
    return [each.before for each in calls.values()]


def _transfer(calls: dict[int, _Work]) -> None:
    (key,) = {work.key for work in calls.values()}
    _, source, target, _ = key
    calls[target].tensor.copy_(calls[source].tensor)


def _reduce(calls: dict[int, _Work], options: Any) -> None:
    tensors = [calls[index].tensor for index in sorted(calls)]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if options.reduceOp == ReduceOp.SUM:
            total += tensor
        else:
            torch.maximum(total, tensor, out=total)
    for tensor in tensors:
        tensor.copy_(total)


class EmulatedNccl:
    """The backends of one rank; what ours do about a rule can be switched off."""

    uses_channels = True
    blocks_device = True

    def __init__(
        self, world: World, device: Device, generation: str, *, is_eager: bool = True,
        aborts_at_once: bool = True, sets_environment: bool = True, enters_threads: bool = True,
    ) -> None:  # fmt: skip
        self._world, self.device, self._generation = world, device, generation
        self._is_eager, self._aborts_at_once = is_eager, aborts_at_once
        self._enters_threads = enters_threads
        if sets_environment:
            prepare_environment()
        self.device.threads.add(threading.get_ident())

    def open(self, name: str, _: Store, index: int, size: int) -> Any:
        group = Group(self._world, self.device, f"{self._generation}/{name}", index, size)
        if self._is_eager:
            group.eager_connect_single_device()
        return group

    def reduce_scatter(self, group: Any, parts: Tensor, into: Tensor) -> Any:
        return group._reduce_scatter_base(into, parts)

    def wait(self, operation: StartedOperation, _: Callable[[], bool]) -> bool:
        operation.work.wait()
        return True

    def enter_thread(self) -> None:
        if self._enters_threads:
            self.device.threads.add(threading.get_ident())

    def abort(self, groups: Sequence[Any]) -> list[threading.Thread]:
        calls = [group.abort for group in groups]
        if self._aborts_at_once:
            return at_once(calls, self.enter_thread)

        def one_by_one() -> None:
            for call in calls:
                call()

        return at_once([one_by_one], self.enter_thread)

    def close(self, groups: list[Any]) -> list[threading.Thread]:
        return at_once([group.shutdown for group in groups], self.enter_thread)
