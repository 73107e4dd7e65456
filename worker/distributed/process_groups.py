"""Ranks as processes: gloo on CPUs, NCCL on GPUs, and a monitor that detects lost ranks.

There is no global group and no global state, so a process can leave one generation and join the
next. All groups are opened before the first step, in one order on all ranks: opening one blocks the
host, and in the middle of a step that could deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, Work

from worker.devices.rank_device import device_error
from worker.distributed.backends import Backends, GlooBackends, NcclBackends
from worker.distributed.interface import (
    AbortedError,
    DeadlineError,
    PeerLostError,
    PendingOperation,
    TransportError,
    VoteRecord,
)
from worker.distributed.operations import MembersByName, OperationLog, StartedOperation
from worker.distributed.peer_monitor import PeerMonitor
from worker.distributed.presence import announce, are_all_there, pause_s
from worker.distributed.process_collective import ProcessCollective
from worker.distributed.stalls import HangCause, RankPosition, find_blame

ReturnedT = TypeVar("ReturnedT")

_CAUSE_S = 2.0
"""Seconds to wait for the monitor to report the cause after a transfer has failed."""
_POLL_S = 0.001
"""Seconds between two checks whether the other ranks have arrived."""
FIRST_STALL_S = 60.0
"""Until the first step is done, an operation is investigated after this time: libraries are still
being loaded."""
STALL_LEAST_S = 3.0
"""After the first step: after twice the last step's time, but at least this."""
ANSWER_S = 1.0
"""Seconds for a peer to answer with its position."""
WATCH_S = 0.5
CLOSE_S = 20.0
"""Seconds for groups to close; a process in which one does not is not used again."""
AFTER_LOSS_S = 1.0
"""The same for gloo after a loss: groups close at once or, while a sum runs, take minutes."""
_ALL = "all"
_PRESENT = "present"
_DATA_TAG = 1


class ProcessTransport:
    """One process's connection to all processes of a generation."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        generation: str = "0",
        device: torch.device | str = "cpu",
        deadline_s: float = 60.0,
        host: str = "127.0.0.1",
        secret: bytes = b"",
        check_cancelled: Callable[[], None] = lambda: None,
        on_stuck: Callable[[str], None] = lambda _: None,
        backends: Backends | None = None,
    ) -> None:
        """Connect to the other ranks; ``check_cancelled`` raises once the generation is over.

        Without a ``secret`` the ranks accept any connection to ``host``. By default
        ``backends`` are those of the device. ``on_stuck`` is called before an error is raised
        that leaves a thread behind, so that this process cannot be used again.
        """
        self._check_cancelled = check_cancelled
        self.rank, self.size = rank, size
        self.deadline_s = deadline_s
        self._device = torch.device(device)
        if backends is None and self._device.type == "cuda":
            backends = NcclBackends(self._device, host, deadline_s)
        self._library = backends or GlooBackends(host, deadline_s)
        self._store = PrefixStore(f"generation/{generation}", store)
        # This is the only reference to a group, so dropping it closes its connections.
        self._groups: dict[str, Any] = {}
        self._collectives: dict[tuple[int, ...], ProcessCollective] = {}
        self._external: Callable[[], Iterable[Any]] = tuple
        self._is_open = False
        self._broken: set[int] = set()
        """Groups that are being aborted, by identity."""
        self._closing: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.requests_early = not self._library.blocks_device
        self.is_stuck = False
        """A group did not open or close, so this process cannot be used again."""
        self.stall_after_s = FIRST_STALL_S
        """An operation that takes longer is investigated."""
        self.stall: HangCause | None = None
        """Whom to blame for the present wait, if that is longer than ``stall_after_s``."""
        self.activity: Callable[[], str] = lambda: "computing"
        """Returns what this rank does while it waits for no operation."""
        self.on_stall: Callable[[HangCause], None] = print_blame
        self.on_failure: Callable[[TransportError], None] = lambda _: None
        """Called once, in whatever thread notices a failure first; others may be computing."""
        self.operations = OperationLog(keeps_unfinished=self._library.blocks_device)
        self.operations.members[_ALL] = tuple(range(size))
        self._monitor = PeerMonitor(
            self._store,
            rank,
            size,
            host=host,
            secret=secret,
            deadline_s=deadline_s,
            on_failure=self._end_all,
            position=self._say_position,
            check_cancelled=check_cancelled,
        )
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="operations")
        self._watcher.start()
        try:
            if not self._library.uses_channels:
                self._open(_ALL, tuple(range(size)))
        except BaseException as error:
            self.abort(str(error) or type(error).__name__)
            self.close()
            if self.is_stuck:
                on_stuck("a group did not open")
            raise

    # ---- opening ---------------------------------------------------------------------------------

    def open(self, groups: Sequence[tuple[int, ...]], channels: Sequence[tuple[int, int]]) -> None:
        for ranks in groups:
            if self.rank in ranks:
                self.group(ranks)
        for source, target in channels if self._library.uses_channels else ():
            if self.rank in (source, target):
                self._open(_channel(source, target), (source, target))
                self._try_channel(source, target)
        self._is_open = True

    def group(self, ranks: tuple[int, ...]) -> ProcessCollective:
        if ranks not in self._collectives:
            shares = len(ranks) == self.size and not self._library.uses_channels
            name = _ALL if shares else "-".join(map(str, ranks))
            collective = ProcessCollective(self, name, ranks)
            if not shares:
                late = self._is_open and self._library.uses_channels
                assert not late, f"the group of ranks {ranks} was not opened before the first step"
                self._open(name, ranks)
            self._collectives[ranks] = collective
            if self._library.uses_channels:
                self._await(collective.start_all_reduce(self._one()), f"trying ranks {ranks}")
        return self._collectives[ranks]

    def _try_channel(self, source: int, target: int) -> None:
        """Send one element, since a library connects two ranks at their first transfer."""
        one, doing = self._one(), f"trying the channel from rank {source} to {target}"
        is_source = source == self.rank
        pending = self.send(one, to=target) if is_source else self.receive(one, source=source)
        self._await(pending, doing)

    def _one(self) -> Tensor:
        return torch.ones(1, device=self._device)

    def _await(self, pending: PendingOperation, doing: str) -> None:
        """Wait on the host, even where a wait blocks only the device."""
        self._poll(pending.is_done, doing)
        pending.wait()
        self.check()

    def _poll(self, is_done: Callable[[], bool], doing: str, *, pause_s: float = _POLL_S) -> None:
        deadline = time.monotonic() + self.deadline_s
        while not is_done():
            self._check_cancelled()
            self.check()
            if time.monotonic() > deadline:
                self._give_up(doing)
            time.sleep(pause_s)

    def _open(self, name: str, ranks: tuple[int, ...]) -> None:
        store = PrefixStore(name, self._store)
        size, index = len(ranks), ranks.index(self.rank)
        doing = f"opening the group of ranks {ranks}"

        def build() -> Any:
            return self._library.open(name, store, index, size)

        # Two operations, since each has the whole deadline.
        with self.operations.on_host(name, doing):
            self.run_guarded(lambda: self._wait_present(store, ranks, doing), doing)
        with self.operations.on_host(name, doing):
            # Gloo waits in vain for a lost rank that had to connect to this one.
            group = self._run_in_own_thread(lambda: self.run_guarded(build, doing), doing)
        with self._lock:
            self._groups[name] = group

    def _run_in_own_thread(self, act: Callable[[], ReturnedT], doing: str) -> ReturnedT:
        """Run a call in a thread, left behind after a loss, a cancellation or the deadline."""
        found: list[ReturnedT] = []
        errors: list[BaseException] = []

        def run() -> None:
            self._library.enter_thread()
            try:
                found.append(act())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True, name=doing)
        thread.start()
        deadline = time.monotonic() + self.deadline_s
        while thread.is_alive():
            try:
                self._check_cancelled()
                self.check()
            except BaseException:
                thread.join(_CAUSE_S)  # The library may fail as well.
                self.is_stuck = self.is_stuck or thread.is_alive()
                raise
            if time.monotonic() > deadline:
                self._give_up(doing)
            thread.join(_POLL_S)
        if errors:
            # The library may fail before the monitor has learnt of the loss that made it fail.
            self.wait_failed()
            self.check()
            raise errors[0]
        return found[0]

    def _wait_present(self, store: Store, ranks: tuple[int, ...], doing: str) -> None:
        """Wait until all members open the group; torch's own wait would not notice a death."""
        announce(store, _PRESENT, len(ranks))
        are_there = partial(are_all_there, store, _PRESENT)
        self._poll(are_there, doing, pause_s=pause_s(len(ranks)))

    # ---- transfers -------------------------------------------------------------------------------

    def send(self, tensor: Tensor, *, to: int) -> PendingOperation:
        data, doing = [tensor.detach()], f"sending to rank {to}"
        name, peer = self._channel_to(self.rank, to)
        log = _channel(self.rank, to)
        return self.start(name, lambda group: group.send(data, peer, _DATA_TAG), doing, log)

    def receive(self, tensor: Tensor, *, source: int) -> PendingOperation:
        data, doing = [tensor.detach()], f"receiving from rank {source}"
        name, peer = self._channel_to(source, self.rank)
        log = _channel(source, self.rank)
        return self.start(name, lambda group: group.recv(data, peer, _DATA_TAG), doing, log)

    def _channel_to(self, source: int, target: int) -> tuple[str, int]:
        """Return the group of a transfer, and the other rank's index in it."""
        other = target if source == self.rank else source
        if not self._library.uses_channels:
            return _ALL, other
        name = _channel(source, target)
        assert name in self._groups, f"the channel from rank {source} to {target} was not opened"
        return name, int(other == target)

    def start(
        self, group: str, begin: Callable[[Any], Work], doing: str, log: str | None = None
    ) -> PendingOperation:
        """Start an operation on a group unless a failure is known.

        ``log`` names the sequence in which it is numbered: transfers that share a group are
        numbered by channel.
        """
        if self._monitor.failure is not None:
            raise _seen_from(self._monitor.failure, doing)
        operation = self.operations.begin(log or group, doing, is_transfer=log is not None)
        operation.work = self.run_guarded(lambda: begin(self._groups[group]), doing)
        return _PendingWork(self, operation)

    def reduce_scatter(self, group: Any, parts: Tensor, into: Tensor) -> Any:
        """Start a reduce-scatter in the way of the library."""
        return self._library.reduce_scatter(group, parts, into)

    # ---- failures --------------------------------------------------------------------------------

    def expect_steps(self, seconds: float) -> None:
        """Investigate operations that take long, compared with the last step."""
        self.stall_after_s = max(STALL_LEAST_S, 2 * seconds)

    def check(self) -> None:
        if self._monitor.failure is not None:
            raise _seen_from(self._monitor.failure, "a check for failures")

    def wait_failed(self) -> bool:
        """Return whether a failure is known; wait a moment for the monitor to report it."""
        return self._monitor.failed.wait(_CAUSE_S)

    def record_vote(self, vote: VoteRecord) -> None:
        self._monitor.vote = vote

    def last_votes(self, wait_s: float) -> list[VoteRecord]:
        return self._monitor.last_votes(wait_s)

    def abort(self, reason: str) -> None:
        self._monitor.fail(AbortedError(reason, rank=self.rank))

    def also_abort(self, external: Callable[[], Iterable[Any]]) -> None:
        """Register external groups that are aborted together with ours."""
        self._external = external

    def run_guarded(self, act: Callable[[], ReturnedT], doing: str) -> ReturnedT:
        """Run ``act``; raise a broken connection as the cause that this rank knows."""
        try:
            return act()
        except RuntimeError as error:
            if device_error(error) is not None:
                raise
            self.raise_cause(error, doing)

    def raise_cause(self, error: RuntimeError, doing: str) -> NoReturn:
        """Raise an error of a library as the cause that this rank knows."""
        if "timed out" in str(error).lower():
            self._give_up(doing)
        # A connection may break before the monitor has learnt which rank broke it.
        self._monitor.failed.wait(_CAUSE_S)
        self._monitor.fail(TransportError(f"{doing}: {error}"))
        assert self._monitor.failure is not None
        raise _seen_from(self._monitor.failure, doing) from error

    def wait(self, operation: StartedOperation) -> None:
        """Wait for an operation; raise the failure that this rank knows, if it does not succeed."""

        def act() -> None:
            if not self._library.wait(operation, lambda: self._monitor.failure is not None):
                self.is_stuck = True
                raise RuntimeError("it goes on after a loss")

        self.run_guarded(act, operation.what)

    def _give_up(self, doing: str) -> None:
        why = "" if self.stall is None else self.stall.text
        self._monitor.fail(DeadlineError(doing, seconds=self.deadline_s, why=why))

    def _watch(self) -> None:
        """Investigate operations that take long; abort those that block the device too long."""
        self._library.enter_thread()
        investigated: StartedOperation | None = None
        while not self._ended.wait(min(WATCH_S, self.deadline_s / 4)):
            oldest = self.operations.oldest()
            if self._monitor.failure is not None:
                continue
            if oldest is None or oldest[0] is not investigated:
                self.stall = None
            if oldest is None:
                continue
            operation, waited_s = oldest
            if waited_s > self.stall_after_s and operation is not investigated:
                investigated, found = operation, self._find_blame()
                after = self.operations.oldest()
                if found is not None and after is not None and after[0] is operation:
                    # It still waits, so all that the others answered is of this wait.
                    self.stall = found
                    self.on_stall(found)
            if self._library.blocks_device and waited_s > self.deadline_s:
                self._give_up(operation.what)

    def _say_position(self) -> dict[str, Any]:
        """Answer a peer that waits; called in the monitor's thread."""
        self._library.enter_thread()
        return self.operations.position(self.activity()).to_json()

    def _find_blame(self) -> HangCause | None:
        said = self._monitor.ask_positions(ANSWER_S)
        positions = {rank: RankPosition.from_json(each) for rank, each in said.items() if each}
        positions[self.rank] = self.operations.position(self.activity())
        members, queues = self.operations.members, self._library.blocks_device
        return find_blame(self.rank, positions, MembersByName(members), queues=queues)

    def _end_all(self, failure: TransportError) -> None:
        """End all waits; the monitor's thread may call this before its constructor returns."""
        self._abort_all()
        self.on_failure(failure)

    def _abort_all(self) -> None:
        """Abort all pending operations, and wait for none; called from any thread.

        The vote's group is the first: otherwise an aborted sum of a layer could let a vote begin
        and end that counts unfinished gradients as complete.
        """
        with self._lock:
            voting = {_ALL, "-".join(map(str, range(self.size)))}
            ours = sorted(self._groups.items(), key=lambda each: each[0] not in voting)
            groups = [*(group for _, group in ours), *self._external()]
            groups = [group for group in groups if id(group) not in self._broken]
            self._broken.update(map(id, groups))
        self._closing += self._library.abort(groups)

    def close(self) -> None:
        """Close all connections; also frees resources after a failure."""
        self._ended.set()
        self._monitor.close()
        self._watcher.join()
        if self._monitor.failure is not None:
            self._abort_all()  # Those that were opened meanwhile.
        groups, is_nccl = list(self._groups.values()), self._library.blocks_device
        self._groups.clear()
        if self._monitor.failure is None or not is_nccl:
            self._closing += self._library.close(groups)
        del groups  # Dropping the last reference to a group waits for its operations.
        wait_s = CLOSE_S if self._monitor.failure is None or is_nccl else AFTER_LOSS_S
        deadline = time.monotonic() + (0.0 if self.is_stuck else wait_s)
        for thread in self._closing:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self.is_stuck = self.is_stuck or any(thread.is_alive() for thread in self._closing)
        self._collectives.clear()
        self._library = _CLOSED


class _Closed:
    """Replaces the library in a closed transport, so that its memory is freed."""

    uses_channels = blocks_device = False


_CLOSED: Any = _Closed()


def print_blame(blame: HangCause) -> None:
    """Write a hang to the worker's log."""
    print(f"a hang: {blame.text}", flush=True)


def _channel(source: int, target: int) -> str:
    return f"{source} to {target}"


def _seen_from(failure: TransportError, doing: str) -> TransportError:
    return PeerLostError(failure.rank, doing) if isinstance(failure, PeerLostError) else failure


class _PendingWork:
    """A pending operation of a process group."""

    __slots__ = ("_operation", "_transport")

    def __init__(self, transport: ProcessTransport, operation: StartedOperation) -> None:
        self._transport, self._operation = transport, operation

    def wait(self) -> None:
        operation, log = self._operation, self._transport.operations
        log.begin_wait(operation)
        self._transport.wait(operation)
        log.end_wait()

    def is_done(self) -> bool:
        return bool(self._operation.work.is_completed())
