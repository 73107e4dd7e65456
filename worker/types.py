"""Types shared with packages that must not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Gradient = Literal["same", "partial"]

StepPhase = Literal[
    "forward", "backward", "send", "receive", "wait", "sync", "snapshot", "vote", "step"
]
"""The phases of a step; the words appear in timelines, fail points and error messages."""


Activity = StepPhase | Literal["start", "data", "end"]
"""A phase of a step, or one of the activities around it."""
ACTIVITIES: tuple[Activity, ...] = ("start", "data", *get_args(StepPhase), "end")


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor of a layer in its full, plan-independent shape."""

    name: str
    shape: tuple[int, ...]
    """Padded to a multiple of the atom size; the same under every plan of a job."""
    split_dim: int | None
    """The dimension that is split into atoms; ``None``: each rank of a stage group holds all."""
    gradient: Gradient = "same"
    """For an unsplit tensor: whether its ranks compute equal gradients or parts of a sum."""
    tied_name: str | None = None
    """The tensor of layer 0 that this one is tied to."""
