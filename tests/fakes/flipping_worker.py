"""The real worker; the first time that a step is done, one rank flips a bit of a weight."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from worker.control import worker_process
from worker.training.step_report import StepReport
from worker.training.trainer import RankTrainer

FLIPPED = "SAILOR_TEST_FLIPPED"
"""Environment variable: a file that is there once the bit was flipped."""
STEP, RANK, LAYER = 23, 1, 1


def main(spec: Mapping[str, Any]) -> int:
    """Run a worker."""
    step = RankTrainer.step

    def flipping_step(trainer: RankTrainer) -> StepReport:
        done = step(trainer)
        if (trainer.progress.step, trainer.rank) == (STEP, RANK) and _is_first():
            master = trainer.buffers[LAYER].master
            bits = {4: (torch.int32, 22), 8: (torch.int64, 51)}
            dtype, highest = bits[master.element_size()]
            master.view(dtype)[0] ^= 1 << highest  # Of the mantissa.
        return done

    RankTrainer.step = flipping_step  # type: ignore[method-assign] # the same, but once
    return worker_process.main(spec)


def _is_first() -> bool:
    try:
        Path(os.environ[FLIPPED]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
