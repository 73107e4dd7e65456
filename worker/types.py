"""Nouns of the runtime that others may know without loading torch: tensors and what ranks do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Gradient = Literal["same", "partial"]

Phase = Literal["forward", "backward", "send", "receive", "wait", "sync", "vote", "step"]
"""What a rank may be doing; the word stands in timelines, fail points and error messages."""


Activity = Phase | Literal["start", "data", "end"]
"""A phase of a step, or one of the activities around it."""
ACTIVITIES: tuple[Activity, ...] = ("start", "data", *get_args(Phase), "end")


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One logical tensor of a layer, whatever plan it is trained under."""

    name: str
    shape: tuple[int, ...]
    """Padded to whole atoms; the same under every plan of a job."""
    split_dim: int | None
    """Where it is cut into atoms; ``None``: every rank of a stage holds all of it."""
    gradient: Gradient = "same"
    """Of a tensor that is not cut: do its ranks compute equal gradients, or parts of a sum?"""
    tied_name: str | None = None
    """This is a second use of the tensor of that name in layer 0."""
