"""The interface between the runtime and the library that moves tensors between ranks.

There is no global process group: a transport is an argument, so that all ranks can be threads of
one process and a process can run several generations in turn. Every wait has a deadline, and
``abort`` from any thread ends all waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

Reduction = Literal["sum", "max"]


class TransportError(RuntimeError):
    """A transfer failed; the transport cannot be used afterwards."""


class PeerLostError(TransportError):
    """A rank's process ended, or its machine is unreachable."""

    def __init__(self, rank: int, doing: str) -> None:
        self.rank = rank
        self.doing = doing
        super().__init__(f"rank {rank} is lost (noticed in {doing})")


class DeadlineError(TransportError):
    """A wait exceeded its deadline although no peer is known to be lost."""

    def __init__(self, doing: str, *, seconds: float, why: str = "") -> None:
        self.doing = doing
        self.seconds = seconds
        super().__init__(f"{doing} did not finish within {seconds:g} s{why and ': '}{why}")


class AbortedError(TransportError):
    """The generation was aborted, here or by a peer."""

    def __init__(self, reason: str, *, rank: int | None = None) -> None:
        self.reason = reason
        self.rank = rank
        super().__init__(reason if rank is None else f"rank {rank}: {reason}")


VoteRecord = tuple[int, list[float]]
"""A step and the all-reduced slots of its vote."""


class PendingOperation(Protocol):
    """An operation that was started without waiting for it."""

    def wait(self) -> None:
        """Wait until it is done; raise ``TransportError`` if it cannot be completed."""

    def is_done(self) -> bool:
        """Return whether it is over, so that ``wait`` returns at once."""


class Collective(Protocol):
    """One rank's view of a group of ranks."""

    size: int
    """The number of ranks in the group."""
    index: int
    """This rank's index in the group, in the order in which the group was named."""

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce over all ranks in place; every rank gets the same bits."""
        self.start_all_reduce(tensor, op).wait()
        return tensor

    def read_sum(self, tensor: Tensor) -> list[Any]:
        """Sum over all ranks, wait on the host and return the values, for it to decide by.

        Raises ``TransportError`` if a failure may have cut the sum short, which ``all_reduce``
        notices on no GPU.
        """
        return self.all_reduce(tensor).tolist()

    def read_max(self, tensor: Tensor) -> list[Any]:
        """Return the maxima over all ranks, as ``read_sum`` returns the sums."""
        return self.all_reduce(tensor, "max").tolist()

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> PendingOperation:
        """Start ``all_reduce``; do not touch the tensor until the wait is over.

        All ranks of a group must start their reductions in the same order.
        """

    def start_reduce(self, tensor: Tensor, *, target: int) -> PendingOperation:
        """Start to sum over all ranks into the tensor of the group's member ``target`` alone.

        What the tensors of the others hold afterwards is undefined.
        """

    def start_broadcast(self, tensor: Tensor, *, source: int) -> PendingOperation:
        """Start to copy the tensor of the group's member ``source`` to all members."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked in the order of the group."""
        found = tensor.new_empty(self.size, *tensor.shape)
        self.start_all_gather(tensor, into=found).wait()
        return found

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Sum stacked parts, one for each rank, over all ranks; return the sum of this rank's."""
        found = parts.new_empty(parts.shape[1:])
        self.start_reduce_scatter(parts, into=found).wait()
        return found

    def start_all_gather(self, tensor: Tensor, *, into: Tensor) -> PendingOperation:
        """Start ``all_gather``; both tensors must be contiguous."""

    def start_reduce_scatter(self, parts: Tensor, *, into: Tensor) -> PendingOperation:
        """Start ``reduce_scatter``; both tensors must be contiguous."""


class Transport(Protocol):
    """One rank's connection to all ranks of a plan."""

    rank: int
    size: int
    """The number of ranks."""
    is_stuck: bool
    """A group did not open or close, so this process cannot be used again."""
    requests_early: bool
    """Whether a sender waits for the receiver's request, so that early requests save time."""

    def open(self, groups: Sequence[tuple[int, ...]], channels: Sequence[tuple[int, int]]) -> None:
        """Connect this rank in every way that training needs, before its first step.

        ``groups`` are those of collectives, ``channels`` the (source, target) of transfers; all
        ranks name all of them in the same order.
        """

    def group(self, ranks: tuple[int, ...]) -> Collective:
        """Return the group of these ranks; all members must open their groups in the same order."""

    def send(self, tensor: Tensor, *, to: int) -> PendingOperation:
        """Start to send; do not change the tensor until the wait is over."""

    def receive(self, tensor: Tensor, *, source: int) -> PendingOperation:
        """Start to receive into the tensor; messages of one source arrive in order."""

    def check(self) -> None:
        """Raise the failure that ended the generation, if there is one."""

    def record_vote(self, vote: VoteRecord) -> None:
        """Remember the last vote; on a failure it is sent to the peers."""

    def last_votes(self, wait_s: float) -> list[VoteRecord]:
        """Return the last recorded votes of this rank and the surviving peers, after a failure."""

    def abort(self, reason: str) -> None:
        """End every wait, here and at the peers; thread-safe and idempotent."""

    def close(self) -> None:
        """Close the connections after the work is done."""
