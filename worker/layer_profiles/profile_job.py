"""Profiles a job: every TP degree and micro batch that was asked for, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from simulator.arrays import Floats
from simulator.documents.problems import InputError, Problem, Problems
from simulator.layer_costs.profile import LayerSizes, Profile, Timing, TimingMeasurement
from simulator.models.layers import CostSetup
from simulator.spec.job import Job
from worker.layer_profiles.device import Device, refusing_too_much
from worker.layer_profiles.growing_batches import (
    DoesNotFitError,
    GrowingBatches,
    measure_growing,
    powers_of_two,
)
from worker.layer_profiles.measure import LayerFigures, measure, measure_optimizer
from worker.layer_profiles.short_model import ShortModel, distinct_layers
from worker.script.recipe import Recipe

MICRO_BATCH_MOST = 64
"""The largest micro batch tried by default; larger ones are extrapolated from the last two."""
_BYTES_PER_WEIGHT = 20
"""Weight, gradient and moments in 32 bits, and a 16-bit copy."""
_OPTIMIZER_SHARE = 0.1
"""The share of a TP degree's time for the optimizer step."""
HOSTS_DIFFER = 0.4
"""How far hosts differ in what they take to launch the same kernels: two machines with an H100 took
0.39 and 0.56 s for the same step of GPT-2 (docs/gpu.md)."""


class Reporter(Protocol):
    """Shows the progress of the profiler."""

    def sampling(self, what: str, samples: int) -> None:
        """Report that one more round was taken."""

    def finished(self, what: str, figures: LayerFigures) -> None:
        """Report that a micro batch is measured."""

    def ended(self, what: str, why: str) -> None:
        """Report why larger micro batches are not measured."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure."""

    tp: tuple[int, ...]
    """Empty: powers of two up to the job's largest degree."""
    micro_batches: tuple[int, ...]
    """Empty: powers of two up to what fits, at most ``MICRO_BATCH_MOST``."""
    budget_s: float
    name: str
    date: str


def profile_job(
    job: Job,
    recipe: Recipe | None,
    request: Request,
    device: Device,
    reporter: Reporter,
    *,
    now: Callable[[], float],
) -> Profile:
    """Measure a job's layers; ``InputError`` if no micro batch fits at any TP degree."""
    degrees = _degrees(job, request.tp)
    sizes = tuple(sorted(set(request.micro_batches))) or powers_of_two(
        min(job.global_batch, MICRO_BATCH_MOST)
    )
    end_s = now() + request.budget_s
    timings: dict[tuple[str, int, int], Timing] = {}
    layer_sizes: dict[int, LayerSizes] = {}
    optimizer_parameters: dict[int, int] = {}
    did_not_fit: dict[tuple[str, int, int], str] = {}
    for index, tp in enumerate(degrees):
        until_s = now() + max(end_s - now(), 0.0) / (len(degrees) - index)
        measured, step = _measure_degree(job, recipe, tp, sizes, device, reporter, now, until_s)
        if measured.too_large is not None:
            did_not_fit[device.kind, tp, measured.too_large] = measured.why
        stands = distinct_layers(job.model)[1]
        for micro_batch, found in measured.found:
            timings[device.kind, tp, micro_batch] = _timing(
                found, stands, None if step is None else step[0], device, tp, request.date
            )
        if measured.found:
            layer_sizes[tp] = _sizes(job, tp, stands, *measured.found[-1])
            if step is not None:
                optimizer_parameters[tp] = step[1]
    if not timings:
        raise InputError(_describe_too_large(job, did_not_fit, device))
    return Profile(
        name=request.name,
        sequence=job.model.tokens_of(job.sequence),
        precision=job.precision,
        layer_names=tuple(layer.name for layer in job.model.layers),
        timings=timings,
        sizes=layer_sizes,
        optimizer_parameters=optimizer_parameters,
        config={"head_has_vocab_projection": True},
        flash_attention=job.uses_flash,
        fingerprint=job.model.fingerprint,
        did_not_fit=frozenset(did_not_fit),
    )


def _degrees(job: Job, wanted: Sequence[int]) -> tuple[int, ...]:
    problems = Problems()
    for tp in wanted:
        if job.max_tp % tp:
            what = f"TP {tp} does not divide the job's max_tp of {job.max_tp}"
            problems.add("--tp", what, "set [training] max_tp to a multiple of it")
        problems.found.extend(job.model.problems_with_tp(tp, place="--tp"))
    problems.raise_if_any()
    if wanted:
        return tuple(sorted(set(wanted)))
    known = (tp for tp in powers_of_two(job.max_tp) if job.max_tp % tp == 0)
    return tuple(tp for tp in known if not job.model.problems_with_tp(tp))


def _measure_degree(
    job: Job,
    recipe: Recipe | None,
    tp: int,
    sizes: Sequence[int],
    device: Device,
    reporter: Reporter,
    now: Callable[[], float],
    until_s: float,
) -> tuple[GrowingBatches[LayerFigures], tuple[float, int] | None]:
    """Measure the micro batches of one TP degree, and the optimizer step."""
    begun_s = now()
    try:
        with refusing_too_much(device):
            device.check_fits(_weight_bytes(job, tp))
            short = ShortModel(job, recipe, tp=tp, device=device.place)
    except DoesNotFitError as error:
        return GrowingBatches((), too_large=min(sizes), why=str(error)), None

    def measure_one(micro_batch: int, one_until_s: float) -> LayerFigures:
        what = f"{device.kind} TP {tp} micro batch {micro_batch}"
        device.check_fits(_activation_bytes(job, tp, micro_batch))
        found = measure(
            short,
            micro_batch,
            device,
            now=now,
            until_s=one_until_s,
            told=lambda samples: reporter.sampling(what, samples),
        )
        reporter.finished(what, found)
        return found

    for_layers_s = begun_s + (1 - _OPTIMIZER_SHARE) * (until_s - begun_s)
    measured = measure_growing(sizes, measure_one, now=now, until_s=for_layers_s)
    if measured.too_large is not None:
        what = f"{device.kind} TP {tp} micro batch {measured.too_large}"
        reporter.ended(what, f"does not fit: {measured.why}")
    elif measured.untried:
        what = f"{device.kind} TP {tp} micro batch {measured.untried[0]}"
        reporter.ended(what, "not measured: time budget used up (--budget)")
    step = None
    if measured.found:
        try:
            step = measure_optimizer(short, device, now=now, until_s=until_s)
        except DoesNotFitError as error:
            reporter.ended(f"{device.kind} TP {tp} optimizer step", f"does not fit: {error}")
    return measured, step


def _weight_bytes(job: Job, tp: int) -> float:
    layers = [job.model.layers[index] for index in distinct_layers(job.model)[0]]
    return float(_BYTES_PER_WEIGHT * sum(layer.parameters(tp) for layer in layers))


def _activation_bytes(job: Job, tp: int, micro_batch: int) -> float:
    """Return about what a micro batch takes, by the model's own counts."""
    setup = CostSetup(
        micro_batch=micro_batch,
        sequence=job.model.tokens_of(job.sequence),
        tp=tp,
        precision=job.precision,
        flash=job.uses_flash,
    )
    layers = [job.model.layers[index] for index in distinct_layers(job.model)[0]]
    kept = sum(layer.kept_bytes(**setup) for layer in layers)
    return kept + max(layer.workspace_bytes(**setup) for layer in layers)


def _timing(
    found: LayerFigures,
    stands: Sequence[int],
    optimizer_s: float | None,
    device: Device,
    tp: int,
    date: str,
) -> Timing:
    rows = {
        name: tuple(getattr(found, name)[at] for at in stands)
        for name in (
            *("forward_s", "backward_s", "forward_spread", "backward_spread"),
            *("host_forward_s", "host_backward_s", "kept_bytes", "transient_bytes"),
        )
    }
    passes_s, waits_s = paced(
        rows["forward_s"] + rows["backward_s"], rows["host_forward_s"] + rows["host_backward_s"]
    )
    forward_s, backward_s = np.split(passes_s, 2)
    by_host = HOSTS_DIFFER * waits_s / passes_s.sum() if waits_s else 0.0
    return Timing(
        forward_s,
        backward_s,
        optimizer_s,
        kept_bytes=np.array(rows["kept_bytes"], dtype=float),
        transient_bytes=np.array(rows["transient_bytes"], dtype=float),
        collectives="apart" if tp > 1 else "inside",
        measurement=TimingMeasurement(
            device=device.name,
            driver=device.driver,
            torch=str(torch.__version__),
            date=date,
            samples=found.samples,
            spread=round(max(found.spread, by_host), 4),
            forward_spread=tuple(round(each, 4) for each in rows["forward_spread"]),
            backward_spread=tuple(round(each, 4) for each in rows["backward_spread"]),
        ),
    )


def paced(device_s: Sequence[float], host_s: Sequence[float]) -> tuple[Floats, float]:
    """Return the seconds of each pass, and how many of them the device waits for the host.

    The host runs ahead in some passes and is caught up with in others, so all passes of a micro
    batch together take as long as the slower of both. What the device lacks to that is shared out
    among the passes that the host takes longer for.
    """
    device, host = np.array(device_s), np.array(host_s)
    lacking = max(float(host.sum() - device.sum()), 0.0)
    excess = np.maximum(host - device, 0.0)
    return (device + excess * (lacking / excess.sum()) if lacking else device), lacking


def _sizes(
    job: Job, tp: int, stands: Sequence[int], micro_batch: int, found: LayerFigures
) -> LayerSizes:
    layers = job.model.layers
    kept = (found.kept_bytes[at] / 4 / micro_batch for at in stands)
    return LayerSizes(
        tuple(layer.parameters(tp) for layer in layers),
        tuple(layer.output_elements(job.model.tokens_of(job.sequence)) for layer in layers),
        tuple(round(each) for each in kept),
    )


def _describe_too_large(
    job: Job, did_not_fit: dict[tuple[str, int, int], str], device: Device
) -> Problem:
    _, tp, micro_batch = min(did_not_fit, key=lambda key: (key[2], -key[1]))
    why = did_not_fit[device.kind, tp, micro_batch]
    what = f"even one micro batch of {micro_batch} at TP {tp} does not fit {device.name}: {why}"
    cure = "give a larger --tp (and [training] max_tp), a shorter sequence or 16-bit precision"
    return Problem(job.model.name, what, cure)
