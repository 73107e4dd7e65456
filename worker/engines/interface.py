"""The interface of a training engine, as snapshots and the control loop use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.distributed.interface import Collective
from worker.layout.rank_layout import Holdings
from worker.profiling.timeline import Recorder
from worker.training.flat_buffers import LayerBuffer
from worker.training.precision import NumberFormats
from worker.training.snapshot_hook import SnapshotHook
from worker.training.step_report import StepReport
from worker.training.trainer import TrainingProgress


class TrainingEngine(Protocol):
    """One rank of a plan, with its state in layer buffers."""

    job: Job
    """``zero`` says whether the buffers hold only the moments that this rank owns."""
    plan: Plan
    rank: int
    device: torch.device
    precision: NumberFormats
    holdings: Holdings
    buffers: Mapping[int, LayerBuffer]
    world_group: Collective | None
    progress: TrainingProgress
    update_complete: bool
    buffers_are_live: bool
    """Whether the buffers always hold the state, or only after ``export_state``."""
    snapshot_hook: SnapshotHook
    unlogged: str
    """Why some of a script's loggers are not used any more."""
    recorder: Recorder

    def step(self) -> StepReport:
        """Train on the next batch; all ranks take the same steps together."""

    def log(self, report: StepReport) -> None:
        """Pass a step's report to a script's loggers."""

    def end_log(self) -> None:
        """Tell a script's loggers that training has ended."""

    def evaluate_if_due(self) -> dict[str, float] | None:
        """Evaluate if that is due after the last step, which another process may have done."""

    @property
    def may_roll_forward(self) -> bool:
        """Whether ``roll_forward`` may finish the step."""

    def roll_forward(self) -> StepReport | None:
        """After a failure: finish the step if a surviving rank has the result of its vote."""

    def export_state(self) -> None:
        """Copy the live state into the buffers; all ranks do so at the same step."""

    def import_state(self) -> None:
        """Continue from the state in the buffers."""

    def close(self) -> None:
        """Leave the process groups and release memory."""
