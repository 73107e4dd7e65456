"""What a keeper of snapshots asks of whoever trains, whichever engine that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.distributed.interface import Collective
from worker.layout.rank_layout import Holdings
from worker.training.flat_buffers import LayerBuffer
from worker.training.precision import Precision
from worker.training.trainer import SnapshotHook, StepReport, TrainingProgress


class TrainingEngine(Protocol):
    """One rank of a plan, and its state in the memory of layers."""

    job: Job
    """``zero`` says whether the memories hold only the moments that this rank owns."""
    plan: Plan
    rank: int
    device: torch.device
    precision: Precision
    holdings: Holdings
    buffers: Mapping[int, LayerBuffer]
    world_group: Collective | None
    progress: TrainingProgress
    update_complete: bool
    snapshot_hook: SnapshotHook

    def step(self) -> StepReport:
        """Train on the next batch; every rank takes the same steps at the same time."""

    def roll_forward(self) -> StepReport | None:
        """All is over for this plan: end the step if some rank that lives has ended it."""

    def export_state(self) -> float:
        """Let the memories hold what was trained; all ranks do so at the same step.

        Returns for how many seconds that held up training.
        """

    def import_state(self) -> None:
        """Go on from what the memories hold."""

    def close(self) -> None:
        """Leave the others, and free what is held."""
