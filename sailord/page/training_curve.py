"""Loss and throughput of the active job over time, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from sailord.core.model.phases import Running
from sailord.core.model.state import State

SAMPLES_MAX = 600
"""Most samples; beyond that every second one is dropped, and the interval doubles."""
EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The job at one moment."""

    at: float
    step: int
    loss: float | None
    per_s: float | None
    """Tokens or samples a second, if the workers measure them."""
    generation: int


@dataclass(eq=False)
class TrainingCurve:
    """Samples of the active job since this sailord leads."""

    job: str = ""
    samples: list[CurvePoint] = field(default_factory=list)
    every_s: float = EVERY_S
    version: int = 0
    """Grows when samples were dropped: a watcher then needs all of them."""

    def observe(self, state: State) -> None:
        """Take a sample if it is time; the last one when the job stops training, too."""
        active = state.active
        if state.term is None or active is None or active.generation is None:
            return
        if active.job != self.job:
            self.job, self.samples, self.every_s = active.job, [], EVERY_S
            self.version += 1
        last = self.samples[-1] if self.samples else None
        is_due = last is None or state.now >= last.at + self.every_s
        is_new = last is None or last.step != active.progress.step
        if not is_due or not is_new or not isinstance(active.phase, Running):
            return
        reports = [report for _, report in state.reports_of(active.generation)]
        newest = max(reports, key=lambda r: (r.step, r.loss is not None), default=None)
        self.samples.append(
            CurvePoint(
                round(state.now, 2),
                active.progress.step,
                None if newest is None else newest.loss,
                None if newest is None else newest.tokens_per_s,
                active.generation.number,
            )
        )
        if len(self.samples) > SAMPLES_MAX:
            self.samples = self.samples[::2]
            self.every_s *= 2
            self.version += 1
