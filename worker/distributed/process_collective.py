"""The collectives of a group of processes, over torch's process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceOptions,
    Work,
)

from worker.distributed.interface import Collective, PendingOperation, Reduction

_OPS: dict[Reduction, Any] = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX}


class GroupTransport(Protocol):
    """What a collective needs of the transport that opened its group."""

    rank: int

    def start(self, group: str, begin: Callable[[Any], Work], doing: str) -> PendingOperation:
        """Start an operation on a group, and number it."""

    def reduce_scatter(self, group: Any, parts: Tensor, into: Tensor) -> Any:
        """Start a reduce-scatter in the way of the library."""

    def check(self) -> None:
        """Raise the failure that ended the generation, if there is one."""


class ProcessCollective(Collective):
    """One rank's view of a process group."""

    def __init__(self, transport: GroupTransport, name: str, ranks: tuple[int, ...]) -> None:
        self.size = len(ranks)
        self.index = ranks.index(transport.rank)
        self._transport = transport
        self._name = name
        self._doing = f"a collective of ranks {ranks}"

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> PendingOperation:
        options = AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._start(lambda group: group.allreduce([tensor.detach()], options))

    def read_sum(self, tensor: Tensor) -> list[Any]:
        return self._check_then_return(super().read_sum(tensor))

    def read_max(self, tensor: Tensor) -> list[Any]:
        return self._check_then_return(super().read_max(tensor))

    def _check_then_return(self, values: list[Any]) -> list[Any]:
        # On a GPU, an aborted collective ends like a completed one.
        self._transport.check()
        return values

    def start_reduce(self, tensor: Tensor, *, target: int) -> PendingOperation:
        options = ReduceOptions()  # It sums unless told otherwise.
        options.rootRank = target
        options.rootTensor = 0
        return self._start(lambda group: group.reduce([tensor.detach()], options))

    def start_broadcast(self, tensor: Tensor, *, source: int) -> PendingOperation:
        options = BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        return self._start(lambda group: group.broadcast([tensor.detach()], options))

    def start_all_gather(self, tensor: Tensor, *, into: Tensor) -> PendingOperation:
        data, found = tensor.detach().view(-1), into.detach().view(-1)
        return self._start(lambda group: group._allgather_base(found, data))

    def start_reduce_scatter(self, parts: Tensor, *, into: Tensor) -> PendingOperation:
        data, found = parts.detach(), into.detach()
        return self._start(lambda group: self._transport.reduce_scatter(group, data, found))

    def _start(self, begin: Callable[[Any], Work]) -> PendingOperation:
        return self._transport.start(self._name, begin, self._doing)
