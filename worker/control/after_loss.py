"""Seals a rank's state after a loss, and announces first how long that will take.

The leader plans meanwhile, and then waits for the seal, if that is worth it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from worker.checkpoint.snapshots.snapshot_manager import SnapshotManager
from worker.distributed.interface import PeerLostError, TransportError
from worker.engines.interface import TrainingEngine
from worker.training.snapshot_hook import ReplicaMismatchError
from worker.training.step_report import StepReport

OF_ONE_GENERATION = (
    *("failure", "is_bug", "room_needed", "broken_peers", "meeting", "withdrew", "contradicted"),
    *("agreed_at", "hang"),
)
"""Keys that leave a worker's status with its generation."""


@dataclass(eq=False, kw_only=True)
class AfterLoss:
    """One rank's last seal of a generation."""

    restored_step: int
    """The step that the generation began from; it need not be sealed again."""
    node_of: Callable[[int], str | None]
    """Returns the node of a rank."""
    has_ended: Callable[[], bool]
    """Returns whether the agent ended the generation: then no peer is to blame."""
    report: Callable[[], None]
    trainer: TrainingEngine | None = None
    snapshots: SnapshotManager | None = None
    status: dict[str, Any] = field(default_factory=dict)
    """The announcement, as a part of the worker's status."""
    _is_saving: bool = False
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def announce(self, error: TransportError) -> None:
        """Announce the seal, or withdraw the announcement if there is nothing to be sealed.

        Called first by the thread that notices the loss, since the main thread may compute for
        seconds; then by the main thread, which knows the step. If the main thread was faster, the
        other call changes nothing.
        """
        lost = frozenset((error.rank,) if isinstance(error, PeerLostError) else ())
        with self._lock:
            trainer, snapshots = self.trainer, self.snapshots
            if self._is_over or self._is_saving or trainer is None or snapshots is None:
                return
            left = snapshots.expected_seal(rolls_forward=trainer.may_roll_forward, lost=lost)
            if left is None or left[0] <= self.restored_step:
                if self.status:  # The other thread did not know that the update was interrupted.
                    self.status = {}
                    self.report()
                return
            status: dict[str, Any] = {"sealing": {"step": left[0], "ready_in_s": left[1]}}
            if not self.has_ended():
                status["broken_peers"] = self.lost_nodes(error)
            self.status = status
            self.report()

    def save(self, report_step: Callable[[StepReport], None]) -> None:
        """Finish the step if a survivor has the result of its vote, and seal the state."""
        if self.snapshots is None or self.trainer is None:
            return
        with self._lock:
            self._is_saving = True
        step_report = self.trainer.roll_forward()
        if step_report is not None:
            report_step(step_report)
        if self.trainer.progress.step > self.restored_step:
            self.snapshots.seal_if_complete()
        if step_report is not None:  # Log last: a script's logger may be slow or fail.
            self.trainer.log(step_report)

    def end(self) -> None:
        """Announce nothing from here on: what was announced is sealed, or cannot be."""
        with self._lock:
            self._is_over, self.status = True, {}

    def close(self) -> None:
        """End, and let the memory of the state go."""
        self.end()
        self.trainer = self.snapshots = None

    def lost_nodes(self, error: TransportError) -> list[str]:
        """Return the nodes that are known to be lost."""
        return self.nodes_of([error.rank] if isinstance(error, PeerLostError) else [])

    def of_difference(self, error: ReplicaMismatchError) -> dict[str, Any]:
        """Return what the worker's status says of replicas that differ."""
        return {"contradicted": self.nodes_of(error.blamed), "agreed_at": error.agreed_at}

    def nodes_of(self, ranks: Iterable[int]) -> list[str]:
        """Return the nodes of ranks, each once."""
        return sorted({node for rank in ranks if (node := self.node_of(rank)) is not None})
