"""The answer type of a job that shares the cluster with others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that runs beside others."""

    id: str
    phase: str
    generation: int | None
    step: int
    steps: int | None
    nodes: tuple[str, ...]
    """The names of the nodes that it has."""
    step_s: float | None = None
    """Seconds of a step, as its nodes report them."""
