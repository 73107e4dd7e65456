"""Converts a case to Metis' inputs, and its groups to plans."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.baselines.metis.cost import (
    BYTES_PER_MS,
    MetisInputs,
    MetisKey,
    MetisNode,
    MetisPlan,
    MetisStrategy,
    Ranks,
    replica_shares,
)
from planner.baselines.shared import equal_gpus
from planner.baselines.shared.equal_gpus import MB, PROFILED_SAMPLES, Fleet
from planner.baselines.shared.machines import bytes_per_s_between, bytes_per_s_within
from planner.compare.interface import Case, Mode
from simulator.estimate.memory import state_bytes_per_parameter
from simulator.models.layers import FLOAT_BYTES
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan, Stage


def inputs_from(case: Case, kinds: Sequence[Fleet], *, mode: Mode = "fixed") -> MetisInputs:
    """Metis' inputs for all GPU kinds of a cluster."""
    job, costs = case.job, case.costs
    recompute = equal_gpus.recompute_of(job)
    states = state_bytes_per_parameter(job)
    layer_ms: dict[MetisKey, tuple[float, ...]] = {}
    layer_mb: dict[MetisKey, tuple[float, ...]] = {}
    tp_max = 1
    for fleet in kinds:
        for t in equal_gpus.tp_degrees(case, max(size for _, size in fleet.machines)):
            tp_max = max(tp_max, t)
            for b in PROFILED_SAMPLES:
                times = costs.times(fleet.gpu, tp=t, samples=b)
                seconds = times.forward + costs.backward_by_layer(
                    fleet.gpu, tp=t, samples=b, recompute=recompute
                )
                held = states * costs.parameters(t)
                held = held + costs.kept_bytes(tp=t, samples=b, recompute=recompute, gpu=fleet.gpu)
                layer_ms[fleet.gpu, t, b] = tuple(float(s) * 1e3 for s in seconds)
                layer_mb[fleet.gpu, t, b] = tuple(float(h) / MB for h in held)
    parameters = [float(p) for p in costs.parameters(1)]
    step = costs.times(kinds[0].gpu, tp=1, samples=1).optimizer_s_per_parameter * sum(parameters)
    return MetisInputs(
        layer_ms=layer_ms,
        layer_mb=layer_mb,
        sync_ms=dict.fromkeys(layer_ms, 0.0),
        # Loading a profile doubles the step (a quirk of the published program).
        optimizer_ms=1e3 * step * (2 if mode == "published" else 1),
        batch_ms=0.0,
        parameter_bytes=tuple(FLOAT_BYTES[job.precision] * p for p in parameters),
        nodes=_nodes(case, kinds),
        batch=job.global_batch,
        sequence=job.sequence,
        hidden=job.model.hidden,
        vocabulary=job.model.vocab,
        tp_max=tp_max,
        samples_max=max(PROFILED_SAMPLES),
    )


def _nodes(case: Case, kinds: Sequence[Fleet]) -> tuple[MetisNode, ...]:
    """One node per machine, with the bandwidth to the worst connected other machine."""
    places = tuple(dict.fromkeys(place for fleet in kinds for place, _ in fleet.machines))
    unit = 1e3 * BYTES_PER_MS
    out = {
        place: min(bytes_per_s_between(case, place, other) for other in places) for place in places
    }
    return tuple(
        MetisNode(
            fleet.gpu,
            size,
            bytes_per_s_within(case, place) / unit,
            out[place] / unit,
            case.facts.capacity_bytes(place) / MB,
        )
        for fleet in kinds
        for place, size in fleet.machines
    )


def to_plan(own: MetisPlan, inputs: MetisInputs, job: Job, kinds: Sequence[Fleet]) -> Plan | str:
    """The plan, or why it cannot be expressed.

    Equal replicas become as many pipelines as all stages allow; uneven shares of a mixed group stay
    one pipeline with split stages.
    """
    if own.cuts[-1] != inputs.layers:
        return f"its partition ends at layer {own.cuts[-1]} of {inputs.layers}"
    samples, rest = divmod(inputs.batch, own.batches)
    assert rest == 0, "numbers of micro batches divide the batch"
    machines = [m for kind in own.kinds for f in kinds if f.gpu == kind for m in f.machines]
    homes = [(i, place) for i, (place, size) in enumerate(machines) for _ in range(size)]
    ranks = Ranks(inputs, own.kinds, own.groups)
    shares = [
        _shares(inputs, ranks.kinds(s), strategy, samples)
        for s, strategy in enumerate(own.strategies)
    ]
    pipelines = 1
    if all(len(set(parts)) == 1 for parts in shares):
        pipelines = math.gcd(*(d for d, _ in own.strategies))
    rows: list[list[Stage]] = [[] for _ in range(pipelines)]
    first = 0
    for stage, (d, t) in enumerate(own.strategies):
        layers = own.cuts[stage], own.cuts[stage + 1]
        if layers[0] == layers[1]:
            return f"stage {stage} has no layers"
        if sum(shares[stage]) != samples:
            return f"micro batches of {samples} samples do not divide among {d} replicas"
        if 0 in shares[stage]:
            return f"a replica of stage {stage} gets no samples"
        groups = [homes[rank : rank + t] for rank in range(first, first + d * t, t)]
        first += d * t
        if any(len({machine for machine, _ in group}) > 1 for group in groups):
            return f"a TP group of stage {stage} spans machines"
        places = [group[0][1] for group in groups]
        each = d // pipelines
        for row in range(pipelines):
            mine = slice(row * each, (row + 1) * each)
            split = shares[stage][mine] if pipelines == 1 else (1,) * each
            rows[row].append(
                Stage(
                    layers,
                    t,
                    tuple(places[mine]),
                    equal_gpus.recompute_of(job),
                    _reduce_split(split),
                )
            )
    counts = equal_gpus.even_counts(job, size=samples // pipelines, pipelines=pipelines)
    if isinstance(counts, str):
        return counts
    assert counts == [own.batches] * pipelines, counts
    return Plan(samples // pipelines, tuple(map(Pipeline, counts, map(tuple, rows))))


def _shares(
    inputs: MetisInputs, kinds: Sequence[str], strategy: MetisStrategy, samples: int
) -> tuple[int, ...]:
    """Samples of a micro batch that each replica of a stage takes."""
    if len(set(kinds)) == 1:
        return (samples // strategy[0],) * strategy[0]
    return tuple(share for _, share in replica_shares(inputs, kinds, strategy, samples))


def _reduce_split(split: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(share // math.gcd(*split) for share in split)
