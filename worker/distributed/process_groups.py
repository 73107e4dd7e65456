"""Ranks as processes: gloo between CPUs, NCCL between GPUs.

Process groups are built directly on a store, each generation under a prefix of its own. There is
no default group and no global state, so that a process may leave one generation and join the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

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
    DeadlineError,
    PeerLostError,
    Pending,
    Reduction,
    TransportError,
    VoteRecord,
)
from worker.distributed.peer_monitor import PeerMonitor

Result = TypeVar("Result")

# torch's own type stubs lack half of what these have.
_Gloo: Any = ProcessGroupGloo
_OPS: dict[Reduction, Any] = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX}
_TELL_S = 0.5
"""How long the watch may take to say why, when a wait has already broken."""
_LOOK_S = 0.001
"""How often a rank looks whether the others have come."""
_UPWARDS, _DOWNWARDS = "upwards", "downwards"
_MAIL_TAG, _NEVER_TAG = 1, 2


class ProcessTransport:
    """All processes of a generation, seen from one of them."""

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
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> None:
        """Meet the others; ``check_cancelled`` raises when nobody wants that any more."""
        self._check_cancelled = check_cancelled
        self.rank, self.size = rank, size
        self.deadline_s = deadline_s
        self._on_gpu = torch.device(device).type == "cuda"
        self._store = PrefixStore(f"generation/{generation}", store)
        # Nobody else keeps a backend, so that its connections close when it is dropped here.
        self._backends: dict[str, Any] = {}
        self._groups: dict[tuple[int, ...], ProcessCollective] = {}
        self._others: Callable[[], Iterable[Any]] = tuple
        self._gloo_device = None if self._on_gpu else _Gloo.create_device(hostname=host)
        self._watch = PeerMonitor(
            self._store,
            rank,
            size,
            host=host,
            deadline_s=deadline_s,
            on_failure=self._end_waits,
            check_cancelled=check_cancelled,
        )
        # One for each direction: what travels between two ranks in one group of NCCL does so in
        # turn, and neither may have to wait with what it sends for what it is sent.
        everybody = tuple(range(size))
        self._open(_UPWARDS, everybody)
        if self._on_gpu:
            self._open(_DOWNWARDS, everybody)

    def group(self, ranks: tuple[int, ...]) -> ProcessCollective:
        if ranks not in self._groups:
            everybody = len(ranks) == self.size and not self._on_gpu
            name = _UPWARDS if everybody else "-".join(map(str, ranks))
            if not everybody:
                self._open(name, ranks)
            self._groups[ranks] = ProcessCollective(self, name, ranks)
        return self._groups[ranks]

    def send(self, tensor: Tensor, *, to: int) -> Pending:
        name = _UPWARDS if to > self.rank or not self._on_gpu else _DOWNWARDS
        return self.start(
            name,
            lambda backend: backend.send([tensor.detach()], to, _MAIL_TAG),
            f"sending to rank {to}",
        )

    def receive(self, tensor: Tensor, *, source: int) -> Pending:
        name = _UPWARDS if source < self.rank or not self._on_gpu else _DOWNWARDS
        return self.start(
            name,
            lambda backend: backend.recv([tensor.detach()], source, _MAIL_TAG),
            f"receiving from rank {source}",
        )

    def check(self) -> None:
        if self._watch.failure is not None:
            raise _as_noticed(self._watch.failure, "looking around")

    def wait_failed(self) -> bool:
        """Is all over? What has just broken here may be known to be so in a moment."""
        return self._watch.failed.wait(_TELL_S)

    def record_vote(self, news: VoteRecord) -> None:
        self._watch.news = news

    def last_votes(self, wait_s: float) -> list[VoteRecord]:
        return self._watch.last_votes(wait_s)

    def abort(self, reason: str) -> None:
        self._watch.fail(AbortedError(reason, rank=self.rank))

    def also_abort(self, others: Callable[[], Iterable[Any]]) -> None:
        """Name backends that somebody else has opened: what waits there is broken with ours."""
        self._others = others

    def close(self) -> None:
        """Leave in peace; of use after a failure too, to free what is open."""
        self._watch.close()
        for backend in self._backends.values():
            backend.shutdown()
        self._backends.clear()
        self._groups.clear()
        self._gloo_device = None

    def start(self, group: str, begin: Callable[[Any], Work], doing: str) -> Pending:
        """Start something on a group, unless all is over."""
        if self._watch.failure is not None:
            raise _as_noticed(self._watch.failure, doing)
        work = self.translate(lambda: begin(self._backends[group]), doing)
        return _ProcessWait(self, work, doing)

    def translate(self, act: Callable[[], Result], doing: str) -> Result:
        """Do something; what breaks is told as what this rank knows to be the cause."""
        try:
            return act()
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                self._watch.fail(DeadlineError(doing, seconds=self.deadline_s))
            # A connection may break before the watch has heard who broke it.
            self._watch.failed.wait(_TELL_S)
            self._watch.fail(TransportError(f"{doing}: {error}"))
            assert self._watch.failure is not None
            raise _as_noticed(self._watch.failure, doing) from error

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
        self.translate(lambda: self._wait_present(store, ranks, doing), doing)
        self._backends[name] = self.translate(build, doing)

    def _wait_present(self, store: Store, ranks: tuple[int, ...], doing: str) -> None:
        """Wait until all members want the group; torch's own wait would not hear of a death."""
        store.set(f"present/{self.rank}", "")
        names = [f"present/{rank}" for rank in ranks]
        deadline = time.monotonic() + self.deadline_s
        while not store.check(names):
            self._check_cancelled()
            self.check()
            if time.monotonic() > deadline:
                self._watch.fail(DeadlineError(doing, seconds=self.deadline_s))
            time.sleep(_LOOK_S)

    def _end_waits(self) -> None:
        """Break whatever waits in any group; called from the watch's thread."""
        for backend in (*self._backends.values(), *self._others()):
            if self._on_gpu:
                backend.abort()
            elif backend.size() > 1:
                _break(backend)


def _as_noticed(failure: TransportError, doing: str) -> TransportError:
    return PeerLostError(failure.rank, doing) if isinstance(failure, PeerLostError) else failure


def _break(backend: Any) -> None:
    """Close a gloo group's connections: a receive that is given up closes all of them.

    Its own ``abort`` leaves what waits waiting.
    """
    somebody = (backend.rank() + 1) % backend.size()
    try:
        backend.recv([torch.zeros(1)], somebody, _NEVER_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


def _nccl(store: Store, index: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 - CPU builds have none

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, index, size, options)


class _ProcessWait:
    """Something under way in a process group."""

    def __init__(self, transport: ProcessTransport, work: Work, doing: str) -> None:
        self._transport, self._work, self._doing = transport, work, doing

    def wait(self) -> None:
        self._transport.translate(self._work.wait, self._doing)

    def is_done(self) -> bool:
        return bool(self._work.is_completed())


class ProcessCollective:
    """A group of processes, seen from one of them."""

    def __init__(self, transport: ProcessTransport, name: str, ranks: tuple[int, ...]) -> None:
        self.size = len(ranks)
        self.index = ranks.index(transport.rank)
        self._transport = transport
        self._name = name
        self._doing = f"a collective of ranks {ranks}"

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        self.start_all_reduce(tensor, op).wait()
        return tensor

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
