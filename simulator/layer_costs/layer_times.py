"""Seconds per layer: measured if possible, else interpolated or computed by the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from simulator.arrays import Floats
from simulator.documents.problems import InputError, Problem, nearest
from simulator.hardware.catalogue import Catalogue
from simulator.layer_costs.profile import Profile, Timing
from simulator.layer_costs.roofline import LayerTimes, Roofline
from simulator.spec.provenance import MEASURED, Provenance

LAUNCH_BOUND = 1.3
"""A layer is launch-bound if a batch of twice the size takes less than this many times as long."""

_LEEWAY = 0.88
"""Share of the scaled roofline that a larger batch takes at least: large kernels are faster."""
_SCALED_ERROR = 0.25
"""The error bar of measured times that the roofline scales."""


@dataclass(slots=True, eq=False)
class LayerTimeTable:
    """Layer times for any GPU kind, TP degree and micro batch, each computed once."""

    profile: Profile | None
    roofline: Roofline
    catalogue: Catalogue
    hook_s: Callable[[str], float]
    """Host time per layer and direction that profiling hooks added, by GPU kind."""
    _cache: dict[tuple[str, int, int], LayerTimes] = field(default_factory=dict)
    _shares: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)

    def times(self, gpu: str, *, tp: int, micro_batch: int) -> LayerTimes:
        """Return the times on ``tp`` GPUs of a kind, for a micro batch of this many samples."""
        key = (gpu, tp, micro_batch)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._find(gpu, tp, micro_batch)
        return found

    def _find(self, gpu: str, tp: int, micro_batch: int) -> LayerTimes:
        profile = self.profile
        if profile is None or not profile.degrees(gpu):
            return self._analytic(gpu, tp, micro_batch)
        other = self._other_conditions(gpu)
        if profile.micro_batches(gpu, tp):
            times = self._interpolate_micro_batches(profile, gpu, tp, micro_batch)
        else:
            times = self._scale_degrees(profile, gpu, tp, micro_batch)
        return times if other is None else self._convert(times, gpu, tp, micro_batch, other)

    def _analytic(self, gpu: str, tp: int, micro_batch: int) -> LayerTimes:
        known = self.catalogue.gpus
        if gpu not in known:
            raise InputError(Problem("GPU", f'"{gpu}" is not known', nearest(gpu, known)))
        return self.roofline.times(gpu, tp=tp, micro_batch=micro_batch)

    # -- measured -------------------------------------------------------------------------

    def _interpolate_micro_batches(
        self, profile: Profile, gpu: str, tp: int, micro_batch: int
    ) -> LayerTimes:
        """Return the measurement, or interpolate linearly over micro batch sizes."""
        sizes, forward, backward = self._rows(profile, gpu, tp)
        entries = [profile.timings[gpu, tp, size] for size in sizes]
        nearby = min(range(len(sizes)), key=lambda i: (abs(sizes[i] - micro_batch), i))
        step, unmeasured = self._optimizer(profile, gpu, tp, entries[nearby])
        notes = tuple(dict.fromkeys(note for entry in entries for note in entry.notes))
        notes = (*notes, *unmeasured)
        if micro_batch in sizes:
            index = sizes.index(micro_batch)
            error = max(MEASURED.relative_error, entries[index].relative_error)
            provenance = Provenance("measured", error, (*entries[index].notes, *unmeasured))
            return LayerTimes(forward[index], backward[index], step, provenance)
        what = f"{gpu} TP {tp} micro batch {micro_batch}"
        error = 0.05 if sizes[0] < micro_batch < sizes[-1] else 0.12
        error = max(error, *(entry.relative_error for entry in entries))
        note = f"{what}: from measured micro batches {', '.join(map(str, sizes))}"
        times = LayerTimes(
            _line(sizes, forward, micro_batch),
            _line(sizes, backward, micro_batch),
            step,
            Provenance("interpolated", error, (note, *notes)),
        )
        if micro_batch > sizes[-1]:
            return self._extrapolate(profile, gpu, tp, micro_batch, times)
        return times

    def _rows(self, profile: Profile, gpu: str, tp: int) -> tuple[list[int], Floats, Floats]:
        """Return the measured sizes, and their forward and backward times without hooks."""
        sizes = profile.micro_batches(gpu, tp)
        entries = [profile.timings[gpu, tp, size] for size in sizes]
        hook = self.hook_s(gpu)
        forward = _subtract_hooks(sizes, np.stack([e.forward_s for e in entries]), hook)
        backward = _subtract_hooks(sizes, np.stack([e.backward_s for e in entries]), hook)
        return sizes, forward, backward

    def _extrapolate(
        self, profile: Profile, gpu: str, tp: int, micro_batch: int, along: LayerTimes
    ) -> LayerTimes:
        """Return extrapolated times; none beats the roofline by more than measured times do.

        Batches so small that launching their kernels takes longest say nothing of larger ones: a
        line through them is nearly flat.
        """
        there = self._roofline_as_measured(profile).times(gpu, tp=tp, micro_batch=micro_batch)
        least_forward, least_backward = self._least_shares(profile, gpu)
        forward = np.maximum(along.forward, there.forward * least_forward * _LEEWAY)
        backward = np.maximum(along.backward, there.backward * least_backward * _LEEWAY)
        if (forward == along.forward).all() and (backward == along.backward).all():
            return along
        note = (
            f"{gpu} TP {tp}: a line through the measured micro batches is too flat, as if bound by "
            "launches; scaled by the roofline"
        )
        provenance = _scale_provenance(along.provenance, note)
        return LayerTimes(forward, backward, along.optimizer_s_per_parameter, provenance)

    def _least_shares(self, profile: Profile, gpu: str) -> tuple[Floats, Floats]:
        """Return the least ratio of measured to computed times, by layer and direction."""
        found = self._shares.get(gpu)
        if found is None:
            roofline, shares = self._roofline_as_measured(profile), list[tuple[Floats, Floats]]()
            for tp in profile.degrees(gpu):
                for size, forward, backward in zip(*self._rows(profile, gpu, tp), strict=True):
                    computed = roofline.times(gpu, tp=tp, micro_batch=size)
                    shares.append((forward / computed.forward, backward / computed.backward))
            forwards, backwards = zip(*shares, strict=True)
            found = self._shares[gpu] = np.min(forwards, axis=0), np.min(backwards, axis=0)
        return found

    def _roofline_as_measured(self, profile: Profile) -> Roofline:
        return self.roofline.under(sequence=profile.sequence, precision=profile.precision)

    def _scale_degrees(self, profile: Profile, gpu: str, tp: int, micro_batch: int) -> LayerTimes:
        """Scale from the nearest measured TP degrees by the ratio that the roofline predicts."""
        degrees, roofline = profile.degrees(gpu), self._roofline_as_measured(profile)
        near = sorted(degrees, key=lambda degree: (abs(np.log2(degree / tp)), degree))[:2]
        target = roofline.times(gpu, tp=tp, micro_batch=micro_batch)
        forward, backward, step, total = np.zeros(1), np.zeros(1), 0.0, 0.0
        notes: dict[str, None] = {}
        error = 0.20
        for degree in near:
            base = self._interpolate_micro_batches(profile, gpu, degree, micro_batch)
            model = roofline.times(gpu, tp=degree, micro_batch=micro_batch)
            notes.update(dict.fromkeys(base.provenance.notes))
            error = max(error, base.provenance.relative_error)
            weight = 1.0 / abs(np.log2(degree / tp))
            forward = forward + base.forward * target.forward / model.forward * weight
            backward = backward + base.backward * target.backward / model.backward * weight
            step += base.optimizer_s_per_parameter * weight
            total += weight
        note = f"{gpu} TP {tp}: not measured, scaled from TP {' and '.join(map(str, sorted(near)))}"
        provenance = Provenance("interpolated", error, (note, *notes))
        return LayerTimes(forward / total, backward / total, step / total, provenance)

    def _optimizer(
        self, profile: Profile, gpu: str, tp: int, timing: Timing
    ) -> tuple[float, tuple[str, ...]]:
        """Return the optimizer's seconds per parameter, and a note if they were not measured."""
        parameters = profile.optimizer_parameters.get(tp)
        if not parameters or timing.optimizer_s is None:
            note = f"{gpu} TP {tp}: optimizer step computed, not measured"
            return self._roofline_as_measured(profile).optimizer_s_per_parameter(gpu), (note,)
        return timing.optimizer_s / parameters, ()

    # -- sequence or precision other than the profile's -----------------------------------------

    def _other_conditions(self, gpu: str) -> str | None:
        """Describe how the job's sequence and precision differ from the profile's, if they do."""
        assert self.profile is not None
        found = []
        if self.profile.sequence != self.roofline.sequence:
            found.append(f"sequence {self.roofline.sequence}, profiled at {self.profile.sequence}")
        if self.profile.precision != self.roofline.precision:
            found.append(
                f"precision {self.roofline.precision}, profiled in {self.profile.precision}"
            )
        return f"{gpu}: {' and '.join(found)}" if found else None

    def _convert(
        self, times: LayerTimes, gpu: str, tp: int, micro_batch: int, what: str
    ) -> LayerTimes:
        assert self.profile is not None
        there = self._roofline_as_measured(self.profile).times(gpu, tp=tp, micro_batch=micro_batch)
        here = self.roofline.times(gpu, tp=tp, micro_batch=micro_batch)
        note = f"{what}; scaled by the roofline"
        return LayerTimes(
            times.forward * here.forward / there.forward,
            times.backward * here.backward / there.backward,
            times.optimizer_s_per_parameter
            * here.optimizer_s_per_parameter
            / there.optimizer_s_per_parameter,
            _scale_provenance(times.provenance, note),
        )


def _scale_provenance(source: Provenance, note: str) -> Provenance:
    """Return the provenance of what the roofline scales: no surer than what it scales."""
    error = max(_SCALED_ERROR, source.relative_error)
    return Provenance("interpolated", error, (note, *source.notes))


def _line(sizes: list[int], rows: Floats, micro_batch: int) -> Floats:
    """Interpolate linearly between measured micro batches; extrapolate along the last two.

    Below the smallest, the time is midway between the proportional share of the smallest
    measured batch and its full time.
    """
    if len(sizes) == 1 or micro_batch < sizes[0]:
        share = micro_batch / sizes[0]
        scaled: Floats = rows[0] * (share if share > 1 else (1 + share) / 2)
        return scaled
    right = min(max(int(np.searchsorted(sizes, micro_batch)), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    slope = (rows[right] - rows[right - 1]) / (high - low)
    line: Floats = rows[right - 1] + np.maximum(slope, 0.0) * (micro_batch - low)
    return line


def _subtract_hooks(sizes: list[int], rows: Floats, hook_s: float) -> Floats:
    """Subtract the host time of profiling hooks from launch-bound layers.

    A hook overlaps with a busy GPU, but adds to the measured time of a launch-bound layer. A
    layer is launch-bound if a larger batch takes hardly longer. The correction is bounded: no
    batch gets faster than the best measured rate per sample, nor than a smaller batch.
    """
    if hook_s == 0.0:
        return rows
    scale = np.array(sizes, dtype=float)[:, None]
    gpu_s = scale * (rows / scale).min(axis=0)
    corrected: Floats = rows.copy()
    for index, (size, larger) in enumerate(pairwise(sizes)):
        allowed = LAUNCH_BOUND ** float(np.log2(larger / size))
        launch_bound = rows[index + 1] <= allowed * rows[index]
        least = np.maximum(gpu_s[index], corrected[index - 1] if index else 0.0)
        without = np.maximum(least, rows[index] - hook_s)
        corrected[index] = np.where(launch_bound, np.minimum(without, rows[index]), rows[index])
    return corrected
