"""Ranks as processes: gloo between CPUs, NCCL between GPUs.

Process groups are built directly on a store, under a prefix for each generation. There is no
default group and no global state, so a process can leave one generation and join the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    Work,
)

from worker.distributed.interface import (
    AbortedError,
    Collective,
    DeadlineError,
    PeerLostError,
    Pending,
    Reduction,
    TransportError,
    VoteRecord,
)
from worker.distributed.peer_monitor import PeerMonitor

Result = TypeVar("Result")

# torch's type stubs miss half of these attributes.
_Gloo: Any = ProcessGroupGloo
_OPS: dict[Reduction, Any] = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX}
_CAUSE_S = 0.5
"""Seconds to wait for the monitor to report the cause after a transfer has failed."""
_POLL_S = 0.001
"""Seconds between two checks whether the other ranks have arrived."""
_UP, _DOWN = "upwards", "downwards"
_DATA_TAG, _UNUSED_TAG = 1, 2


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
    ) -> None:
        """Connect to the other ranks; ``check_cancelled`` raises once the generation is over.

        Without a ``secret`` the ranks trust everybody who can reach ``host``.
        """
        self._check_cancelled = check_cancelled
        self.rank, self.size = rank, size
        self.deadline_s = deadline_s
        self._on_gpu = torch.device(device).type == "cuda"
        self._store = PrefixStore(f"generation/{generation}", store)
        # This is the only reference to a backend, so dropping it closes its connections.
        self._backends: dict[str, Any] = {}
        self._groups: dict[tuple[int, ...], ProcessCollective] = {}
        self._external: Callable[[], Iterable[Any]] = tuple
        self._gloo_device = None if self._on_gpu else _Gloo.create_device(hostname=host)
        self._monitor = PeerMonitor(
            self._store,
            rank,
            size,
            host=host,
            secret=secret,
            deadline_s=deadline_s,
            on_failure=self._abort_all,
            check_cancelled=check_cancelled,
        )
        # One NCCL group for each direction: operations between two ranks run in order within a
        # group, and a send must not wait for a receive.
        try:
            for name in (_UP, _DOWN) if self._on_gpu else (_UP,):
                self._open(name, tuple(range(size)))
        except BaseException as error:
            self.abort(str(error) or type(error).__name__)
            self.close()
            raise

    def group(self, ranks: tuple[int, ...]) -> ProcessCollective:
        if ranks not in self._groups:
            all_ranks = len(ranks) == self.size and not self._on_gpu
            name = _UP if all_ranks else "-".join(map(str, ranks))
            if not all_ranks:
                self._open(name, ranks)
            self._groups[ranks] = ProcessCollective(self, name, ranks)
        return self._groups[ranks]

    def send(self, tensor: Tensor, *, to: int) -> Pending:
        name = _UP if to > self.rank or not self._on_gpu else _DOWN
        data = [tensor.detach()]
        return self.start(name, lambda b: b.send(data, to, _DATA_TAG), f"sending to rank {to}")

    def receive(self, tensor: Tensor, *, source: int) -> Pending:
        name = _UP if source < self.rank or not self._on_gpu else _DOWN
        data, doing = [tensor.detach()], f"receiving from rank {source}"
        return self.start(name, lambda b: b.recv(data, source, _DATA_TAG), doing)

    def check(self) -> None:
        if self._monitor.failure is not None:
            raise _seen_from(self._monitor.failure, "a check for failures")

    def wait_failed(self) -> bool:
        """Return whether a failure is known; wait 0.5 s for the monitor to report it."""
        return self._monitor.failed.wait(_CAUSE_S)

    def record_vote(self, vote: VoteRecord) -> None:
        self._monitor.vote = vote

    def last_votes(self, wait_s: float) -> list[VoteRecord]:
        return self._monitor.last_votes(wait_s)

    def abort(self, reason: str) -> None:
        self._monitor.fail(AbortedError(reason, rank=self.rank))

    def also_abort(self, external: Callable[[], Iterable[Any]]) -> None:
        """Register external backends that are aborted together with ours."""
        self._external = external

    def close(self) -> None:
        """Close all connections; also frees resources after a failure."""
        self._monitor.close()
        for backend in self._backends.values():
            backend.shutdown()
        self._backends.clear()
        self._groups.clear()
        self._gloo_device = None

    def start(self, group: str, begin: Callable[[Any], Work], doing: str) -> Pending:
        """Start an operation on a group unless a failure is known."""
        if self._monitor.failure is not None:
            raise _seen_from(self._monitor.failure, doing)
        work = self.run_guarded(lambda: begin(self._backends[group]), doing)
        return _PendingWork(self, work, doing)

    def run_guarded(self, act: Callable[[], Result], doing: str) -> Result:
        """Run ``act``; raise an error as the cause that this rank knows."""
        try:
            return act()
        except RuntimeError as error:
            self.raise_cause(error, doing)

    def raise_cause(self, error: RuntimeError, doing: str) -> NoReturn:
        """Raise an error of a library as the cause that this rank knows."""
        if "timed out" in str(error).lower():
            self._monitor.fail(DeadlineError(doing, seconds=self.deadline_s))
        # A connection may break before the monitor has learnt which rank broke it.
        self._monitor.failed.wait(_CAUSE_S)
        self._monitor.fail(TransportError(f"{doing}: {error}"))
        assert self._monitor.failure is not None
        raise _seen_from(self._monitor.failure, doing) from error

    def _open(self, name: str, ranks: tuple[int, ...]) -> None:
        store = PrefixStore(name, self._store)
        size, index = len(ranks), ranks.index(self.rank)
        timeout = timedelta(seconds=self.deadline_s)

        def build() -> Any:
            if self._on_gpu:
                return _nccl(store, index, size, timeout)
            options = _Gloo._Options()
            options._timeout = timeout
            options._devices = [self._gloo_device]
            options._threads = 1
            return _Gloo(store, index, size, options)

        doing = f"opening the group of ranks {ranks}"
        self.run_guarded(lambda: self._wait_present(store, ranks, doing), doing)
        self._backends[name] = self.run_guarded(build, doing)

    def _wait_present(self, store: Store, ranks: tuple[int, ...], doing: str) -> None:
        """Wait until all members open the group; torch's own wait would not notice a death."""
        store.set(f"present/{self.rank}", "")
        names = [f"present/{rank}" for rank in ranks]
        deadline = time.monotonic() + self.deadline_s
        while not store.check(names):
            self._check_cancelled()
            self.check()
            if time.monotonic() > deadline:
                self._monitor.fail(DeadlineError(doing, seconds=self.deadline_s))
            time.sleep(_POLL_S)

    def _abort_all(self) -> None:
        """Break all pending operations; called from the monitor's thread."""
        for backend in (*self._backends.values(), *self._external()):
            if self._on_gpu:
                backend.abort()
            elif backend.size() > 1:
                _break_gloo(backend)


def _seen_from(failure: TransportError, doing: str) -> TransportError:
    return PeerLostError(failure.rank, doing) if isinstance(failure, PeerLostError) else failure


def _break_gloo(backend: Any) -> None:
    """Close a gloo group's connections: a receive that times out closes all of them.

    gloo's ``abort`` does not end pending waits.
    """
    peer = (backend.rank() + 1) % backend.size()
    try:
        backend.recv([torch.zeros(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


def _nccl(store: Store, index: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 - CPU builds have none

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, index, size, options)


class _PendingWork:
    """A pending operation of a process group."""

    def __init__(self, transport: ProcessTransport, work: Work, doing: str) -> None:
        self._transport, self._work, self._doing = transport, work, doing

    def wait(self) -> None:
        self._transport.run_guarded(self._work.wait, self._doing)

    def is_done(self) -> bool:
        return bool(self._work.is_completed())


class ProcessCollective(Collective):
    """One rank's view of a process group."""

    def __init__(self, transport: ProcessTransport, name: str, ranks: tuple[int, ...]) -> None:
        self.size = len(ranks)
        self.index = ranks.index(transport.rank)
        self._transport = transport
        self._name = name
        self._doing = f"a collective of ranks {ranks}"

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        options = AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._start(lambda backend: backend.allreduce([tensor.detach()], options))

    def start_broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        options = BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._start(lambda backend: backend.broadcast([tensor.detach()], options))

    def _start(self, begin: Callable[[Any], Work]) -> Pending:
        return self._transport.start(self._name, begin, self._doing)
