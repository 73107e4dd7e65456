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


@dataclass(frozen=True, slots=True)
class StoredCurve:
    """The samples as they are stored: by column, which is a third as long."""

    job: str
    every_s: float
    at: tuple[float, ...]
    step: tuple[int, ...]
    loss: tuple[float | None, ...]
    per_s: tuple[float | None, ...]
    generation: tuple[int, ...]


@dataclass(eq=False)
class TrainingCurve:
    """Samples of the active job."""

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

    def stored(self) -> StoredCurve:
        """Return what the next leader needs."""
        columns = zip(
            *((s.at, s.step, _short(s.loss), _short(s.per_s), s.generation) for s in self.samples),
            strict=True,
        )
        return StoredCurve(self.job, self.every_s, *(columns if self.samples else [()] * 5))

    def resume(self, known: StoredCurve) -> None:
        """Go on from what the last leader stored."""
        rows = zip(known.at, known.step, known.loss, known.per_s, known.generation, strict=False)
        self.job, self.every_s = known.job, known.every_s
        self.samples = [CurvePoint(*row) for row in rows]
        self.version += 1


def _short(value: float | None) -> float | None:
    """As much as a chart shows."""
    return None if value is None else float(f"{value:.6g}")
