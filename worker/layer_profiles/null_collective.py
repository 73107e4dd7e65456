"""A collective that does nothing, to measure one rank's share of a layer on one device."""

from __future__ import annotations

from torch import Tensor

from worker.distributed.interface import Collective, PendingOperation, Reduction


class _Done(PendingOperation):
    def wait(self) -> None:
        return

    def is_done(self) -> bool:
        return True


class NullCollective(Collective):
    """Stands for the other ranks of a TP group; sums are those of one rank alone."""

    def __init__(self, size: int) -> None:
        self.size, self.index = size, 0

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> PendingOperation:  # noqa: ARG002 - nothing is reduced
        return _Done()

    def start_reduce(self, tensor: Tensor, *, target: int) -> PendingOperation:  # noqa: ARG002 - nothing is reduced
        return _Done()

    def start_broadcast(self, tensor: Tensor, *, source: int) -> PendingOperation:  # noqa: ARG002 - nothing is sent
        return _Done()

    def start_all_gather(self, tensor: Tensor, *, into: Tensor) -> PendingOperation:
        into.copy_(tensor.expand_as(into))
        return _Done()

    def start_reduce_scatter(self, parts: Tensor, *, into: Tensor) -> PendingOperation:
        into.copy_(parts[0])
        return _Done()
