"""What the runtime asks of whatever carries tensors between the ranks of a plan.

Nothing here or above it knows a global process group: a transport is an argument, so that all
ranks may be threads of one process, and several generations of a plan may follow one another in
one process. Every wait has a deadline, and ``abort`` from any thread ends all of them.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Reduction = Literal["sum", "max"]


class TransportError(RuntimeError):
    """A tensor did not come or go; the transport is of no use after it."""


class PeerLostError(TransportError):
    """A rank has gone: its process ended, or its machine cannot be reached."""

    def __init__(self, rank: int, doing: str) -> None:
        self.rank = rank
        self.doing = doing
        super().__init__(f"rank {rank} is gone (noticed in {doing})")


class DeadlineError(TransportError):
    """Something took longer than a rank is ready to wait, though no peer is known to be gone."""

    def __init__(self, doing: str, *, seconds: float) -> None:
        self.doing = doing
        self.seconds = seconds
        super().__init__(f"{doing} was not done after {seconds:g} s")


class AbortedError(TransportError):
    """Somebody, here or at a peer, has ended the generation."""

    def __init__(self, reason: str, *, rank: int | None = None) -> None:
        self.reason = reason
        self.rank = rank
        super().__init__(reason if rank is None else f"rank {rank}: {reason}")


VoteRecord = tuple[int, list[float]]
"""A step, and what came of its vote."""


class Pending(Protocol):
    """Something under way that was started without waiting."""

    def wait(self) -> None:
        """Return when it is done; raise a ``TransportError`` when it never will be."""

    def is_done(self) -> bool:
        """Say whether it is over; the wait that follows then takes no time."""


class Collective(Protocol):
    """The ranks of one group, seen from one of them."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    @property
    def index(self) -> int:
        """Which of them this one is, in the order in which the group was named."""

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """Put the reduction of all ranks' tensors into each of them, the same bits in all."""

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        """Begin ``all_reduce``; the tensor is left alone until the wait is over.

        All ranks of a group start their reductions in one order.
        """

    def start_broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        """Begin to put the tensor of the group's member ``source`` into all of them."""


class Transport(Protocol):
    """All ranks of a plan, seen from one of them."""

    @property
    def rank(self) -> int:
        """Which rank this is."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def group(self, ranks: tuple[int, ...]) -> Collective:
        """The group of these ranks; all of its members ask for their groups in one order."""

    def send(self, tensor: Tensor, *, to: int) -> Pending:
        """Begin to send; the tensor is left alone until the wait is over."""

    def receive(self, tensor: Tensor, *, source: int) -> Pending:
        """Begin to receive into the tensor what ``source`` sends, message by message in order."""

    def check(self) -> None:
        """Raise what has ended the generation, if anything has."""

    def record_vote(self, news: VoteRecord) -> None:
        """Have the peers told of this, should all end before there is newer."""

    def last_votes(self, wait_s: float) -> list[VoteRecord]:
        """When all is over: what those that live, this one included, had noted last."""

    def abort(self, reason: str) -> None:
        """End every wait, here and at the peers; may be called from any thread, more than once."""

    def close(self) -> None:
        """Leave in peace, when all is done."""
