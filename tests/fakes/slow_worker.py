"""The real worker, with the times of a large model: a step and a seal take longer."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from worker.checkpoint import snapshot_file
from worker.checkpoint.snapshot_file import Header
from worker.control import worker_process
from worker.training.step_report import StepReport
from worker.training.trainer import RankTrainer

SEAL_S = "SAILOR_TEST_SEAL_S"
STEP_S = "SAILOR_TEST_STEP_S"
"""Environment variables: seconds by which each seal and each step are delayed."""


def main(spec: Mapping[str, Any]) -> int:
    """Run a worker."""
    seal, step = snapshot_file.seal, RankTrainer.step

    def slow_seal(file: int, header: Header) -> None:
        time.sleep(float(os.environ.get(SEAL_S, "0")))
        seal(file, header)

    def slow_step(trainer: RankTrainer) -> StepReport:
        time.sleep(float(os.environ.get(STEP_S, "0")))
        return step(trainer)

    snapshot_file.seal = slow_seal  # type: ignore[assignment] # the same, but later
    RankTrainer.step = slow_step  # type: ignore[method-assign] # the same, but later
    return worker_process.main(spec)
