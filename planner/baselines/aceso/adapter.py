"""Converts a case to Aceso's inputs, and its configurations to plans."""

from __future__ import annotations

from collections import defaultdict

from planner.baselines.aceso.cost import AcesoInputs, AcesoKey, AcesoPlan, AcesoRow
from planner.baselines.shared import equal_gpus
from planner.baselines.shared.equal_gpus import MB, PROFILED_SAMPLES, Fleet, ReplicatedStage
from planner.baselines.shared.machines import bytes_per_s_within
from planner.compare.interface import Case, Mode
from simulator.models.layers import FLOAT_BYTES
from simulator.spec.job import OPTIMIZER_MOMENTS, Job
from simulator.spec.plan import Plan

TOKEN_BYTES = 4
"""What the first operator receives per token."""


def inputs_from(case: Case, fleet: Fleet, *, mode: Mode = "fixed") -> AcesoInputs:
    """Aceso's inputs for a fleet.

    Aceso counts a micro batch over all replicas of a stage together. ``published`` tries 1 to 8
    samples, in powers of two; ``fixed`` tries up to 8 per GPU, so that a stage may have a replica
    on every GPU.
    """
    job, costs = case.job, case.costs
    width, moments = FLOAT_BYTES[job.precision], OPTIMIZER_MOMENTS[job.optimizer]
    recompute = equal_gpus.recompute_of(job)
    degrees = equal_gpus.tp_degrees(case, fleet.gpus_per_machine)
    rows: defaultdict[str, dict[AcesoKey, AcesoRow]] = defaultdict(dict)
    sent = [costs.output_bytes(layer) / MB for layer in range(costs.layer_count)]
    received = [TOKEN_BYTES * job.sequence / MB, *sent[:-1]]
    for key in ((b, t) for b in PROFILED_SAMPLES for t in degrees):
        b, t = key
        times = costs.times(fleet.gpu, tp=t, samples=b)
        back = costs.backward_by_layer(fleet.gpu, tp=t, samples=b, recompute=recompute)
        kept = costs.kept_bytes(tp=t, samples=b, recompute=recompute, gpu=fleet.gpu)
        scratch = costs.workspace_bytes(tp=t, samples=b, recompute=recompute, gpu=fleet.gpu)
        rows["forward_ms"][key] = tuple(1e3 * float(s) for s in times.forward)
        rows["backward_ms"][key] = tuple(1e3 * float(s) for s in back)
        rows["in_mb"][key] = tuple(b * mb for mb in received)
        rows["out_mb"][key] = tuple(b * mb for mb in sent)
        rows["weights_mb"][key] = tuple(width * float(p) / MB for p in costs.parameters(t))
        rows["kept_mb"][key] = tuple(float(k) / MB for k in kept)
        rows["scratch_forward_mb"][key] = (0.0,) * costs.layer_count
        rows["scratch_backward_mb"][key] = tuple(float(s) / MB for s in scratch)
    largest = max(PROFILED_SAMPLES) * (fleet.gpus if mode == "fixed" else 1)
    sizes = [1 << k for k in range(largest.bit_length()) if job.global_batch % (1 << k) == 0]
    fp32_over_weight = 1 if job.precision == "fp32" else 2
    return AcesoInputs(
        **rows,
        within_mb_per_ms=bytes_per_s_within(case, fleet.place) / 1e3 / MB,
        between_mb_per_ms=equal_gpus.fleet_bytes_per_s(case, fleet) / 1e3 / MB,
        gpus=fleet.gpus,
        gpus_per_node=fleet.gpus_per_machine,
        memory_mb=case.facts.capacity_bytes(fleet.place) / MB,
        batch=job.global_batch,
        micro_batches=tuple(sizes),
        tp_max=max(degrees),
        # The fp32 copy and the moments are counted in weights, which are half as wide in 16 bit.
        copies_main=0 if fp32_over_weight == 1 else 2,
        copies_optimizer=moments * fp32_over_weight,
    )


def to_plan(own: AcesoPlan, job: Job, fleet: Fleet) -> Plan | str:
    """The plan, or why it cannot be expressed.

    There are as many pipelines as the greatest common divisor of the data degrees; the rest of a
    degree splits a micro batch.
    """
    shapes = [
        ReplicatedStage((stage.first, stage.end), stage.t, stage.d, equal_gpus.recompute_of(job))
        for stage in own.config.stages
    ]
    rows = equal_gpus.folded(shapes)
    size, rest = divmod(own.config.micro_batch, len(rows))
    assert rest == 0, "every data degree divides the micro batch"
    return equal_gpus.placed_plan(fleet, job, rows, size=size)
