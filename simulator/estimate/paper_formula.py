"""The paper estimator: the closed formula of the SOSP'25 Sailor system, kept for comparison.

Source: *Sailor: Automating Distributed Training over Dynamic, Heterogeneous, and Geo-distributed
Clusters*, SOSP 2025, and the numbers published with it. Where the published numbers imply a
doubtful choice, the formula here makes the same one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from simulator.documents.problems import InputError, Problems
from simulator.estimate.dollars import UsdPerHour, usd_per_hour_by_pool
from simulator.estimate.memory import OUTER_BYTES
from simulator.estimate.outer_steps import LOSS_NOTE
from simulator.estimate.result import DeviceMemory, Estimate, Money
from simulator.layer_costs.profile import Profile
from simulator.network.network import Network
from simulator.spec.job import Job
from simulator.spec.plan import Place, Plan, Stage, with_sizes
from simulator.spec.provenance import Provenance

FP32_BYTES = 4
STATE_BYTES_PER_PARAMETER = 24
"""The formula's total; weights, gradients and two Adam moments account for 16."""
BUCKET_BYTES = 5e8
"""Gradients are reduced in buckets of at most this size."""
MOST_TP_SHARING_GRADIENTS = 4
RELATIVE_ERROR = 0.10
"""Mean error of iteration time on the 16 published runs: 9.3 %."""

_End = tuple[str, str, int]
"""Zone, GPU kind and number of GPUs of one end of a transfer."""


def overhead_bytes(tp: int) -> float:
    """Return the memory besides states and activations, in the check whether a plan fits."""
    return 2e9 if tp == 1 else 3e9


@dataclass(frozen=True, slots=True)
class FormulaResult:
    """The formula's result; its time terms add up to the iteration."""

    straggler_s: float
    """The slowest stage, for all micro batches but one."""
    pipeline_s: float
    """One micro batch through all stages."""
    sync_s: float
    update_s: float
    memory: tuple[tuple[DeviceMemory, ...], ...]
    """Per pipeline and stage; ``fits`` of each is the formula's memory check."""
    money: Money
    bottleneck: str
    notes: tuple[str, ...] = ()
    outer_s: float = 0.0
    """An outer step's share of each iteration; the other terms are then of the slowest group."""

    @property
    def iteration_s(self) -> float:
        return self.straggler_s + self.pipeline_s + self.update_s + self.sync_s + self.outer_s

    @property
    def peak_bytes(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(device.total for device in row) for row in self.memory)

    @property
    def fits(self) -> tuple[tuple[bool, ...], ...]:
        return tuple(tuple(device.fits for device in row) for row in self.memory)

    def estimate(self, plan: Plan) -> Estimate:
        """Return the result in the form that all estimators share."""
        return Estimate(
            estimator="paper",
            iteration_s=self.iteration_s,
            samples_per_iteration=plan.samples_per_iteration,
            memory=self.memory,
            money=self.money,
            stages=(),
            bottleneck=self.bottleneck,
            provenance=Provenance("measured", RELATIVE_ERROR),
            notes=self.notes,
        )


def paper_estimate(
    plan: Plan,
    *,
    job: Job,
    profile: Profile,
    network: Network,
    usd_per_hour: UsdPerHour,
    capacity_bytes: Callable[[Place], float],
    gpus_per_node: Callable[[Place], int],
) -> FormulaResult:
    """Estimate a plan by the closed formula; raise ``InputError`` if it does not apply.

    With outer steps, groups iterate by themselves (ADR 118).
    """
    problems = Problems()
    _check_shape(plan, profile, problems)
    problems.raise_if_any()
    plan = with_sizes(plan, plan.size_by_pipeline)
    _check_measured(plan, profile, problems)
    problems.raise_if_any()
    links = _Links(network, problems)
    parts = [plan.outer_group(pipelines) for pipelines in plan.outer_groups]
    rows = _rows(plan, profile, gpus_per_node)
    rows_of = [rows]
    if plan.outer_every is not None:
        rows_of = [_rows(part, profile, gpus_per_node) for part in parts]
    found = [_times(*each, links) for each in zip(parts, rows_of, strict=True)]
    sent = _Sent(_messages(plan, rows))
    for part, own in zip(parts, rows_of, strict=True):
        sent.add(_sums(len(part.pipelines), own))
    times, bottleneck = max(found, key=lambda one: sum(one[0].values()))
    if plan.outer_every is not None:
        # An outer step sums as many bytes as gradients have, over all pipelines.
        summed_s = max(_sync_s(row, links) for row in rows)
        times["outer_s"] = (summed_s + max(row.update_s for row in rows)) / plan.outer_every
        sent.add(_sums(len(plan.pipelines), rows), 1 / plan.outer_every)
    egress = _egress(sent, network, problems)
    problems.raise_if_any()
    return FormulaResult(
        **times,
        memory=_memory(plan, profile, capacity_bytes),
        money=_money(plan, sum(times.values()), egress, usd_per_hour),
        bottleneck=bottleneck,
        notes=_notes(plan, job, profile),
    )


def _times(plan: Plan, rows: tuple[_Row, ...], links: _Links) -> tuple[dict[str, float], str]:
    """Return the terms of the iteration of pipelines that sum gradients, and the bottleneck."""
    compute_s = [row.compute_s for row in rows]
    transfer_s = [_transfer_s(rows, index, links) for index in range(len(rows))]
    sync_s = [_sync_s(row, links) for row in rows]
    slowest = max(range(len(rows)), key=lambda index: compute_s[index] + transfer_s[index])
    straggler_s = compute_s[slowest] + transfer_s[slowest]
    # All pipelines count with the largest number of micro batches.
    micro_batches = max(pipeline.micro_batches for pipeline in plan.pipelines)
    times = {
        "straggler_s": (micro_batches - 1) * straggler_s,
        "pipeline_s": sum(compute_s) + sum(transfer_s),
        "sync_s": max(sync_s),
        "update_s": max(row.update_s for row in rows),
    }
    if times["sync_s"] > times["straggler_s"] + times["pipeline_s"]:
        return times, f"gradient sync of stage {sync_s.index(max(sync_s))}"
    return times, f"stage {slowest}"


def _check_shape(plan: Plan, profile: Profile, problems: Problems) -> None:
    """Reject plans that the formula does not cover."""
    assert plan.pipelines, "a plan has pipelines"
    cure = "use the estimator event"
    if plan.schedule != "1f1b" or plan.virtual_stages != 1:
        what = f"the paper estimator supports 1f1b, not {plan.schedule}"
        problems.add("schedule", what, cure)
    if plan.sequence_parallel:
        problems.add("sequence_parallel", "the paper estimator does not support it", cure)
    if plan.zero is not None:
        problems.add("zero", "the paper estimator does not shard moments", cure)
    if len(plan.sizes) > 1:
        shown = ", ".join(map(str, plan.sizes))
        what = f"are {shown}, and the paper estimator has one micro batch size"
        problems.add("micro batch sizes", what, cure)
    shared = [stage.layers for stage in plan.pipelines[0].stages]
    for index, pipeline in enumerate(plan.pipelines):
        if [stage.layers for stage in pipeline.stages] != shared:
            problems.add(
                f"pipelines[{index}]",
                "its layer boundaries differ from those of pipelines[0],"
                " and the paper estimator requires equal ones",
                cure,
            )
        for number, stage in enumerate(pipeline.stages):
            where = f"pipelines[{index}].stages[{number}]"
            if len(stage.places) > 1:
                problems.add(where, "the paper estimator does not support split stages", cure)
            if stage.recompute != "none":
                problems.add(where, "the paper estimator does not support recomputation", cure)
            if stage.offload:
                problems.add(where, "the paper estimator does not support offload", cure)
    if shared[-1][1] != len(profile.layer_names):
        problems.add(
            "pipelines[0]",
            f"ends at layer {shared[-1][1]}, but the profile {profile.name} has"
            f" {len(profile.layer_names)} layers",
            "name the profile of this model",
        )


def _check_measured(plan: Plan, profile: Profile, problems: Problems) -> None:
    """Reject combinations that were not measured: the formula does not interpolate."""
    micro_batch = plan.micro_batch_size
    # Report each combination once, at its first stage.
    first: dict[tuple[str, int], str] = {}
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            first.setdefault((stage.place.gpu, stage.tp), f"pipelines[{index}].stages[{number}]")
    for (gpu, tp), where in first.items():
        if (gpu, tp, micro_batch) not in profile.timings:
            measured = ", ".join(map(str, profile.micro_batches(gpu, tp))) or "none"
            problems.add(
                where,
                f"{gpu} at TP {tp} and micro batch {micro_batch} was not measured"
                f" (measured at this TP: {measured}), and the paper estimator does not interpolate",
                "measure it, or use the estimator event",
            )
        if tp not in profile.sizes:
            problems.add(where, f"the profile {profile.name} has no sizes for TP {tp}")
    if 1 not in profile.sizes:
        problems.add(f"profile {profile.name}", "has no sizes for TP 1, needed for messages")


@dataclass(frozen=True, slots=True)
class _Row:
    """One stage of all pipelines, with the inputs of the formula."""

    ends: tuple[_End, ...]
    """Per pipeline, the place of its replica as the end of a transfer."""
    compute_s: float
    update_s: float
    output_bytes: float
    """Activations that the stage sends per micro batch, or gradients that it gets back."""
    gradient_bytes: float
    """Gradients of all parameters of the stage at TP 1."""
    smallest_tp: int


def _rows(plan: Plan, profile: Profile, gpus_per_node: Callable[[Place], int]) -> tuple[_Row, ...]:
    whole = profile.sizes[1]
    rows = []
    for column in zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True):
        first, end = column[0].layers
        timings = [
            profile.timings[gpu, tp, plan.micro_batch_size]
            for gpu, tp in dict.fromkeys((stage.place.gpu, stage.tp) for stage in column)
        ]
        rows.append(
            _Row(
                ends=tuple(_end(stage, gpus_per_node) for stage in column),
                compute_s=max(
                    float(timing.forward_s[first:end].sum() + timing.backward_s[first:end].sum())
                    for timing in timings
                ),
                # The formula does not scale this time, which was measured on a small model.
                update_s=max(timing.optimizer_s or 0.0 for timing in timings),
                output_bytes=FP32_BYTES * whole.output_elements[end - 1] * plan.micro_batch_size,
                gradient_bytes=FP32_BYTES * sum(whole.parameters[first:end]),
                smallest_tp=min(stage.tp for stage in column),
            )
        )
    return tuple(rows)


def _end(stage: Stage, gpus_per_node: Callable[[Place], int]) -> _End:
    place = stage.place
    return place.zone, place.gpu, min(stage.tp, gpus_per_node(place))


@dataclass(slots=True)
class _Links:
    """Transfer seconds by the raw polynomials, cached; missing curves are reported."""

    network: Network
    problems: Problems
    known: dict[tuple[_End, _End, float], float] = field(default_factory=dict)

    def seconds(self, sender: _End, receiver: _End, size_bytes: float) -> float:
        key = (sender, receiver, size_bytes)
        if key not in self.known:
            self.known[key] = self._seconds(sender, receiver, size_bytes)
        return self.known[key]

    def slowest_s(
        self, senders: tuple[_End, ...], receivers: tuple[_End, ...], size_bytes: float
    ) -> float:
        """Return the slowest of the transfers from each sender to its receiver."""
        pairs = dict.fromkeys(zip(senders, receivers, strict=True))
        return max(self.seconds(sender, receiver, size_bytes) for sender, receiver in pairs)

    def _seconds(self, sender: _End, receiver: _End, size_bytes: float) -> float:
        if size_bytes <= 0:
            return 0.0  # A layer without parameters has no gradients to send.
        curves = self.network.measured.raw_between.get((sender[:2], receiver[:2]), {})
        curve = curves.get((sender[2], receiver[2]))
        where = " to ".join(f"{gpus} x {gpu} in {zone}" for zone, gpu, gpus in (sender, receiver))
        if curve is None or curve.polynomial is None:
            self.problems.add(
                where,
                "the network file has no fitted curve",
                "measure it, or use the estimator event",
            )
            return math.nan
        bytes_per_s = curve.polynomial_bytes_per_s(size_bytes)
        if bytes_per_s <= 0:
            self.problems.add(
                where,
                f"the fitted bandwidth is {bytes_per_s / 1e9:.3g} GB/s for a message"
                f" of {size_bytes:.0f} bytes, which makes the plan invalid for the paper estimator",
                "use fewer pipelines or a larger micro batch, or the estimator event",
            )
            return math.nan
        return size_bytes / bytes_per_s


def _transfer_s(rows: tuple[_Row, ...], index: int, links: _Links) -> float:
    """Return the seconds in which a stage sends one micro batch's activations and gradients.

    Each direction takes its own slowest replica, as follows from the published times of plans that
    mix GPU kinds within a stage.
    """
    own = rows[index]
    forward_s = backward_s = 0.0
    if index + 1 < len(rows):
        forward_s = links.slowest_s(own.ends, rows[index + 1].ends, own.output_bytes)
    if index > 0:
        before = rows[index - 1]
        backward_s = links.slowest_s(own.ends, before.ends, before.output_bytes)
    return sent_s(index, len(rows), forward_s, backward_s)


def sent_s(stage: int, stages: int, forward_s: float, backward_s: float) -> float:
    """Return the seconds of a stage's messages per micro batch, from those of each direction.

    As in the published times, the first and last stage may count their only neighbour twice.
    """
    if stages == 1:
        return 0.0
    if stage == 0:
        return forward_s if stages <= 3 else 2 * forward_s
    return 2 * backward_s if stage == stages - 1 else forward_s + backward_s


def all_reduce_s(size: float, replicas: int, message_s: Callable[[float], float]) -> float:
    """Return the seconds of an all-reduce in buckets, given those of a message of some bytes."""
    if replicas == 1:
        return 0.0
    full, rest = divmod(size, BUCKET_BYTES)
    step_s = message_s(rest / replicas)
    if full:
        step_s += full * message_s(BUCKET_BYTES / replicas)
    return 2 * (replicas - 1) * step_s


def _sync_s(row: _Row, links: _Links) -> float:
    """Return the seconds of the stage's all-reduce, by its slowest pair of consecutive replicas.

    As in the published times over several zones, the pair that closes the ring, from the last
    pipeline to the first, does not count. It does count in ``_egress``.
    """
    singles = tuple((zone, gpu, 1) for zone, gpu, _ in row.ends)
    each_bytes = row.gradient_bytes / min(MOST_TP_SHARING_GRADIENTS, row.smallest_tp)
    return max(
        (
            all_reduce_s(each_bytes, len(row.ends), partial(links.seconds, *pair))
            for pair in dict.fromkeys(pairwise(singles))
        ),
        default=0.0,
    )


def _memory(
    plan: Plan, profile: Profile, capacity_bytes: Callable[[Place], float]
) -> tuple[tuple[DeviceMemory, ...], ...]:
    known: dict[tuple[int, int, float], DeviceMemory] = {}
    outer = 0 if plan.outer_every is None else OUTER_BYTES

    def device(index: int, stage: Stage, stages: int) -> DeviceMemory:
        key = (index, stage.tp, capacity_bytes(stage.place))
        if key not in known:
            first, end = stage.layers
            sizes = profile.sizes[stage.tp]
            parameters = sum(sizes.parameters[first:end])
            # Micro batches in flight equal the remaining stages, even if the plan has fewer.
            in_flight = plan.micro_batch_size * (stages - index)
            known[key] = DeviceMemory(
                parameters=FP32_BYTES * parameters,
                gradients=FP32_BYTES * parameters,
                optimizer=(STATE_BYTES_PER_PARAMETER - 2 * FP32_BYTES + outer) * parameters,
                activations=FP32_BYTES * sum(sizes.kept_elements[first:end]) * in_flight,
                workspace=0.0,
                communication=0.0,
                context=overhead_bytes(stage.tp),
                fragmentation=0.0,
                capacity=key[2],
            )
        return known[key]

    return tuple(
        tuple(device(i, stage, len(p.stages)) for i, stage in enumerate(p.stages))
        for p in plan.pipelines
    )


_Traffic = Iterator[tuple[str, str, float]]
"""What is sent in an iteration: from a zone to a zone, and its bytes."""


class _Sent(dict[tuple[str, str], float]):
    """Bytes of an iteration between zones."""

    def __init__(self, traffic: _Traffic) -> None:
        super().__init__()
        self.add(traffic)

    def add(self, traffic: _Traffic, share: float = 1.0) -> None:
        for sender, receiver, size_bytes in traffic:
            if sender != receiver:
                self[sender, receiver] = self.get((sender, receiver), 0) + share * size_bytes


def _egress(sent: _Sent, network: Network, problems: Problems) -> dict[str, float]:
    """Return the dollars of the bytes that cross zones in one iteration, by direction."""
    usd = {}
    for (sender, receiver), size_bytes in sorted(sent.items()):
        try:
            price = network.egress_usd_per_byte(sender, receiver)
        except InputError as error:
            problems.take(error)
            continue
        usd[f"{sender} -> {receiver}"] = size_bytes * price
    return usd


def _messages(plan: Plan, rows: tuple[_Row, ...]) -> _Traffic:
    """Yield activations and gradients between stages."""
    for row, after in pairwise(rows):
        for pipeline, (zone, *_), (other, *_) in zip(
            plan.pipelines, row.ends, after.ends, strict=True
        ):
            # Bytes count with the pipeline's own micro batches, unlike its time.
            size_bytes = row.output_bytes * pipeline.micro_batches
            yield zone, other, size_bytes
            yield other, zone, size_bytes


def _sums(count: int, rows: tuple[_Row, ...]) -> _Traffic:
    """Yield the gradients that ``count`` pipelines sum in a ring."""
    if count == 1:
        return
    for row in rows:
        for (zone, *_), (other, *_) in zip(row.ends, row.ends[1:] + row.ends[:1], strict=True):
            yield zone, other, 2 * (count - 1) * row.gradient_bytes / count


def _money(
    plan: Plan,
    iteration_s: float,
    egress: dict[str, float],
    usd_per_hour: UsdPerHour,
) -> Money:
    devices: Counter[Place] = Counter()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            devices[stage.place] += stage.tp
    by_pool, unpriced = usd_per_hour_by_pool(devices, {}, usd_per_hour)
    compute = {pool: usd / 3600 * iteration_s for pool, usd in by_pool.items()}
    return Money(
        compute_usd=None if unpriced else math.fsum(compute.values()),
        egress_usd=math.fsum(egress.values()),
        by_pool_usd=tuple(compute.items()),
        by_egress_usd=tuple(egress.items()),
        unpriced=unpriced,
    )


def _notes(plan: Plan, job: Job, profile: Profile) -> tuple[str, ...]:
    """Return notes on job settings that the formula ignores, and on doubtful measurements."""
    notes = [] if plan.outer_every is None else [LOSS_NOTE]
    if job.precision != "fp32":
        notes.append(f"the paper estimator assumes fp32, the job uses {job.precision}")
    if job.optimizer not in ("adam", "adamw"):
        notes.append(f"the paper estimator assumes Adam, the job uses {job.optimizer}")
    if job.zero:
        notes.append("the paper estimator ignores ZeRO and counts the whole optimizer state")
    if job.sequence != profile.sequence:
        notes.append(
            f"the profile was measured at sequence {profile.sequence}, not {job.sequence},"
            " and the paper estimator does not scale it"
        )
    kinds = {(stage.place.gpu, stage.tp): None for row in plan.pipelines for stage in row.stages}
    for gpu, tp in kinds:
        notes += profile.timings[gpu, tp, plan.micro_batch_size].notes
    return tuple(dict.fromkeys(notes))
