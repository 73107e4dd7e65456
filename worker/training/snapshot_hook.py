"""What takes snapshots of a trainer, as the trainer calls it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol


class ReplicaMismatchError(RuntimeError):
    """Ranks that hold the same state have different bits; all of them raise it."""

    def __init__(
        self,
        text: str,
        *,
        blamed: Sequence[int] = (),
        keys: Sequence[Hashable] = (),
        agreed_at: int | None = None,
    ) -> None:
        self.blamed = tuple(blamed)
        """The ranks that most other holders contradict; none if there is no majority."""
        self.keys = tuple(keys)
        """The pieces that differ."""
        self.agreed_at = agreed_at
        """The last step after which all holders had the same bits; ``None``: not known."""
        super().__init__(text)


class SnapshotHook(Protocol):
    """Takes snapshots; is asked before the state changes."""

    def wants_to_stop(self, step: int) -> bool:
        """Return whether this step is the last; called with complete gradients, may wait."""

    def before_update(self) -> None:
        """Wait until the state may be changed."""

    def before_giving_up(self) -> None:
        """Raise a better reason than a non-finite number, if there is one; all ranks call it."""


class NoSnapshots:
    """Takes no snapshots."""

    def wants_to_stop(self, step: int) -> bool:  # noqa: ARG002 - part of the interface
        return False

    def before_update(self) -> None:
        return

    def before_giving_up(self) -> None:
        return
