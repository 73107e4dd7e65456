"""The interval of durable checkpoints, by Young and Daly."""

from __future__ import annotations

import math

from planner.replan.move_cost import DEFAULT_TIMES
from planner.replan.state_map import STATE_BYTES
from simulator.spec.job import OPTIMIZER_MOMENTS, Job

PRIOR_S = 6 * 3600.0
"""Assumed time between two losses before anything was observed."""


def write_s(job: Job, machines: int) -> float:
    """Seconds that the machines take to write the job's state, each at the assumed rate."""
    parameters = sum(layer.parameters() for layer in job.model.layers)
    size = parameters * STATE_BYTES * (1 + OPTIMIZER_MOMENTS[job.optimizer])
    return size / max(1, machines) / DEFAULT_TIMES.restore_bytes_per_s


def checkpoint_every_s(
    *, cost_s: float, write_s: float, observed_s: float, losses: int | float
) -> float:
    """Seconds between two checkpoints: √(2 · cost · time between losses).

    ``cost_s`` is the training time that one takes, ``losses`` were observed in ``observed_s``. The
    interval is at least ``write_s``: a checkpoint begins after the last one was written.
    """
    between_s = (observed_s + PRIOR_S) / (losses + 1)
    return max(write_s, math.sqrt(2 * cost_s * between_s))
