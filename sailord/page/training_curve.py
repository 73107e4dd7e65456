"""Loss and throughput of jobs over time, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sailord.core.model.phases import Running
from sailord.core.model.state import State

SAMPLES_MAX = 600
"""Most samples; beyond that every second one is dropped, and the interval doubles."""
EVERY_S = 1.0
CURVES_MAX = 16
"""Most curves that are kept: those that ended first are forgotten first, and none of a job that
runs."""


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


@dataclass(frozen=True, slots=True)
class StoredCurves(StoredCurve):
    """The curves of the jobs that run, or else the last one."""

    others: tuple[StoredCurve, ...] = ()
    """Those of jobs beside it; an older version reads the first one alone."""


@dataclass(eq=False)
class TrainingCurve:
    """Samples of one job."""

    job: str = ""
    samples: list[CurvePoint] = field(default_factory=list)
    every_s: float = EVERY_S
    version: int = 0
    """Grows when samples were dropped: a watcher then needs all of them."""

    @property
    def last_at(self) -> float:
        """The moment of the last sample."""
        return self.samples[-1].at if self.samples else float("-inf")

    def observe(self, state: State) -> None:
        """Take a sample of the active job if it is time; the last one when it stops training."""
        active = state.active
        if active is None or active.generation is None:
            return
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

    def before(self, at: float) -> CurvePoint | None:
        """Return the last sample with a throughput up to a moment."""
        known = (each for each in reversed(self.samples) if each.at <= at)
        return next((each for each in known if each.per_s is not None), None)

    def first(self, until: float) -> CurvePoint | None:
        """Return the first sample with a throughput, if it is not after a moment."""
        found = next((each for each in self.samples if each.per_s is not None), None)
        return found if found is not None and found.at <= until else None

    def columns(self) -> StoredCurve:
        """Return the samples as they are stored."""
        columns = zip(
            *(
                (s.at, s.step, _shorten(s.loss), _shorten(s.per_s), s.generation)
                for s in self.samples
            ),
            strict=True,
        )
        return StoredCurve(self.job, self.every_s, *(columns if self.samples else [()] * 5))


@dataclass(eq=False)
class TrainingCurves:
    """The curves of all jobs that run, and of those that ran last."""

    by_job: dict[str, TrainingCurve] = field(default_factory=dict)
    none: TrainingCurve = field(default_factory=TrainingCurve)
    """Of a job that has no samples."""
    running: frozenset[str] = frozenset()

    def observe(self, parts: Iterable[State]) -> None:
        """Take samples of the jobs of these parts, if it is time."""
        led = [part for part in parts if part.term is not None and part.active is not None]
        self.running = frozenset(part.job.id for part in led)
        for part in led:
            job, known = part.job, self.by_job.get(part.job.id)
            # An earlier job that is forgotten may have had the same id.
            if known is None or (known.samples and known.last_at < job.submitted_at):
                known = self.by_job[job.id] = TrainingCurve(job.id)
                self._forget_oldest()
            known.observe(part)

    def of(self, job: str | None) -> TrainingCurve:
        """Return a job's curve; ``None``: the one with the last sample."""
        if job is not None:
            return self.by_job.get(job, self.none)
        return max(self.by_job.values(), key=lambda each: each.last_at, default=self.none)

    def kept(self) -> list[TrainingCurve]:
        """Return the curves that the next leader needs, the one with the last sample first."""
        curves = sorted(self.by_job.values(), key=lambda each: each.last_at, reverse=True)
        curves = [curve for curve in curves if curve.samples]
        return [curve for curve in curves if curve.job in self.running] or curves[:1]

    def stored(self) -> StoredCurves:
        """Return them as they are stored; there is at least one."""
        first, *others = (curve.columns() for curve in self.kept())
        columns = first.at, first.step, first.loss, first.per_s, first.generation
        return StoredCurves(first.job, first.every_s, *columns, tuple(others))

    def resume(self, known: StoredCurves) -> None:
        """Go on from what the last leader stored, but for curves of ours that are newer."""
        for each in (known, *known.others):
            own = self.by_job.get(each.job, self.none)
            if each.at and (not own.samples or each.at[-1] > own.last_at):
                columns = each.at, each.step, each.loss, each.per_s, each.generation
                samples = [CurvePoint(*row) for row in zip(*columns, strict=False)]
                self.by_job[each.job] = TrainingCurve(each.job, samples, each.every_s)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        ended = [curve for curve in self.by_job.values() if curve.job not in self.running]
        ended.sort(key=lambda each: each.last_at)
        for curve in ended[: max(len(self.by_job) - CURVES_MAX, 0)]:
            del self.by_job[curve.job]


def _shorten(value: float | None) -> float | None:
    """Round a value to the digits that a chart shows."""
    return None if value is None else float(f"{value:.6g}")
