"""The report of a step: loss, norm, samples and seconds, as printed and logged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SLOW_DATA = 0.1
"""A step tells of its wait for samples from this share of it on."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one step, the same on every rank but for ``seconds`` and what has a default."""

    step: int  # Steps done before this one.
    loss: float
    grad_norm: float
    samples: int
    seconds: float
    sample_hash: str
    label_tokens: int
    learning_rate: float
    skipped: bool
    """The loss or a gradient was not finite, so the weights are as before."""
    skipped_steps: int
    """How many steps of the run were skipped so far."""
    stop: bool
    at_peak_s: float | None = None
    """How long the step would take at the GPUs' peak; ``None``: that is not known."""
    data_wait_s: float = 0.0
    """How long this rank waited for its samples."""

    @property
    def mfu(self) -> float | None:
        """The part of the GPUs' peak that was used: model FLOPs utilization."""
        return None if self.at_peak_s is None else self.at_peak_s / self.seconds

    def figures(self) -> dict[str, float]:
        """Return what loggers write of a step."""
        found = {
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "samples_per_s": self.samples / self.seconds,
            "skipped_steps": self.skipped_steps,
        }
        if self.label_tokens != self.samples:
            found["tokens_per_s"] = self.label_tokens / self.seconds
        return found if self.mfu is None else {**found, "mfu": self.mfu}

    def line(self) -> dict[str, Any]:
        """Return what is printed of a step, as JSON: a number that is not finite is ``None``."""
        line: dict[str, Any] = {"step": self.step, **self.figures(), "samples": self.samples}
        line |= {"seconds": self.seconds, "sample_hash": self.sample_hash}
        if self.skipped:
            line["skipped"] = True
        if self.data_wait_s >= SLOW_DATA * self.seconds:
            line["data_wait_s"] = self.data_wait_s
        return finite(line)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
