"""The transport of a plan with a single rank, which sends to no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from worker.distributed.interface import AbortedError, Transport, VoteRecord


class SingleRankTransport(Transport):
    """Only an abort from another thread, and the vote that it may interrupt, matter to one rank."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.requests_early = self.is_stuck = False
        self._failure: AbortedError | None = None
        self._votes: list[VoteRecord] = []

    def open(self, groups: Sequence[tuple[int, ...]], channels: Sequence[tuple[int, int]]) -> None:
        """Do nothing: a single rank has no peers."""

    def group(self, ranks: tuple[int, ...]) -> NoReturn:
        raise AssertionError(f"a single rank opens no group of ranks {ranks}")

    def send(self, tensor: Tensor, *, to: int) -> NoReturn:
        raise AssertionError(f"a single rank sends {tensor.shape} to no rank {to}")

    def receive(self, tensor: Tensor, *, source: int) -> NoReturn:
        raise AssertionError(f"a single rank receives {tensor.shape} from no rank {source}")

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def record_vote(self, vote: VoteRecord) -> None:
        self._votes = [vote]

    def last_votes(self, wait_s: float) -> list[VoteRecord]:  # noqa: ARG002 - it is known at once
        return self._votes

    def abort(self, reason: str) -> None:
        self._failure = self._failure or AbortedError(reason, rank=0)

    def close(self) -> None:
        return
