"""Metis: unequal device groups of mixed GPU kinds, balanced by profiled speed and memory.

It walks through orders of the GPU kinds, device groups and numbers of micro batches, starts each
with data parallelism only and turns it into tensor parallelism where memory is tight (Um, Byun,
Lee, Hwang, USENIX ATC 2024). It knows all kinds of a cluster, one bandwidth within and one between
machines per kind. ``published`` keeps what ``Repairs`` lists; both modes count the elements
that a cut carries as if they were bytes (quirk, kept).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, permutations

from planner.baselines import fleet as fleets
from planner.baselines.fleet import Fleet
from planner.baselines.metis_balancer import adapt_capacities, balance_layers
from planner.baselines.metis_cost import (
    BYTES_PER_MS,
    FIXED,
    PUBLISHED,
    Inputs,
    Key,
    Node,
    OwnPlan,
    Ranks,
    Repairs,
    Strategy,
    group_ms,
    plan_ms,
    replica_shares,
    stage_mb,
)
from planner.baselines.metis_groups import device_groups
from planner.baselines.uniform import bytes_per_s_between, bytes_per_s_within
from planner.case import Case, Mode, Proposal
from simulator.job import Job
from simulator.model import FLOAT_BYTES
from simulator.plan import Pipeline, Plan, Stage

ATTEMPTS_MAX = 3
"""Layer partitions tried per strategy before memory counts as too small."""
SAMPLES = (1, 2, 4, 8)
"""Micro batches of which profiles are made."""
MB = 2.0**20


# Search ----------------------------------------------------------------------------------------


def search(
    inputs: Inputs, *, repairs: Repairs = FIXED, groups_max: int | None = None
) -> list[OwnPlan]:
    """All plans that have a cost, the fastest first.

    ``groups_max`` bounds the device groups tried per order of kinds and number of stages.
    """
    found = []
    for plan in candidates(inputs, repairs=repairs, groups_max=groups_max):
        ms = plan_ms(inputs, plan, repairs=repairs)
        if ms is not None:
            found.append(replace(plan, ms=ms))
    return sorted(found, key=lambda plan: plan.ms)


def candidates(
    inputs: Inputs, *, repairs: Repairs = FIXED, groups_max: int | None = None
) -> Iterator[OwnPlan]:
    """Order of kinds outermost, then number of stages, groups, numbers of micro batches."""
    gpus = sum(node.gpus for node in inputs.nodes)
    counts = [n for n in range(inputs.batch, 0, -1) if inputs.batch % n == 0]
    # By name; the public program takes the kinds as a hash set gives them.
    orders = permutations(sorted({node.kind for node in inputs.nodes}))
    for number, kinds in enumerate(orders):
        for stages in range(1, min(gpus, inputs.layers) + 1):
            switched = not repairs.stage_count and number > 0 and stages == 1 and gpus > 1
            all_groups = device_groups(
                2 if switched else stages,
                gpus=gpus,
                variance=inputs.variance,
                permuted_max=inputs.permuted_max,
            )
            for groups in islice(all_groups, groups_max):
                for batches in counts:
                    for plan in strategies(inputs, kinds, groups, batches, repairs=repairs):
                        yield replace(plan, stages_costed=1) if switched else plan


def strategies(
    inputs: Inputs,
    kinds: tuple[str, ...],
    groups: tuple[int, ...],
    batches: int,
    *,
    repairs: Repairs = FIXED,
) -> Iterator[OwnPlan]:
    """Degrees inside the stages, from all data towards all tensor parallel, that fit in memory."""
    ranks = Ranks(inputs, kinds, groups)
    chosen: list[Strategy] = [(group, 1) for group in groups]
    room: list[float] | None = None
    while True:
        samples = [inputs.batch // d // batches for d, _ in chosen]
        if all(
            0 < b <= inputs.samples_max and t <= inputs.tp_max
            for b, (_, t) in zip(samples, chosen, strict=True)
        ):
            cuts, room, attempts = partition(inputs, ranks, chosen, batches, repairs=repairs)
            whole = cuts is not None and cuts[-1] == inputs.layers
            if cuts is not None and (whole or not repairs.whole_layers):
                yield OwnPlan(kinds, groups, tuple(chosen), batches, cuts, len(groups), attempts)
                if attempts == 1 and not repairs.goes_on:
                    return
        worth = room or [1 / d for d, _ in chosen]
        open_stages = [stage for stage, (d, _) in enumerate(chosen) if d != 1]
        if not open_stages:
            return
        tightest = min(open_stages, key=lambda stage: worth[stage])
        d, t = chosen[tightest]
        chosen[tightest] = (d // 2, 2 * t)


def partition(
    inputs: Inputs,
    ranks: Ranks,
    chosen: Sequence[Strategy],
    batches: int,
    *,
    repairs: Repairs = FIXED,
) -> tuple[tuple[int, ...] | None, list[float] | None, int]:
    """Cuts that balance speed and fit in memory, the memory left over, the attempts made."""
    try:
        return _partition(inputs, ranks, chosen, batches, repairs)
    except KeyError:  # A kind was never profiled with so many ranks or samples.
        return None, None, 0


def _partition(
    inputs: Inputs, ranks: Ranks, chosen: Sequence[Strategy], batches: int, repairs: Repairs
) -> tuple[tuple[int, ...] | None, list[float] | None, int]:
    everything = (0, inputs.layers)
    speeds = [
        1 / group_ms(inputs, ranks.kinds(s), strategy, batches=batches, layers=everything)
        for s, strategy in enumerate(chosen)
    ]
    capacities = [speed / sum(speeds) for speed in speeds]
    kind = next(kind for kind, t, b in inputs.layer_ms if (t, b) == (1, 1))
    row = inputs.layer_ms[kind, 1, 1]
    demands = [ms / sum(row) for ms in row]
    for attempt in range(1, ATTEMPTS_MAX + 1):
        cuts = balance_layers(capacities, demands)
        judged = [
            stage_mb(inputs, ranks, s, chosen[s], batches, layers, repairs=repairs)
            for s, layers in enumerate(pairwise(cuts))
        ]
        memory, demand = [m for m, _ in judged], [d for _, d in judged]
        room = [m - d for m, d in judged]
        if all(left > 0 for left in room):
            return cuts, room, attempt
        adapted = adapt_capacities(capacities, memory_mb=memory, demand_mb=demand)
        if adapted is None:
            break
        capacities = adapted
    return None, None, ATTEMPTS_MAX


# From and to the common terms ------------------------------------------------------------------


def inputs_from(case: Case, kinds: Sequence[Fleet], *, mode: Mode = "fixed") -> Inputs:
    """What Metis would be told of all GPU kinds of a cluster."""
    job, costs = case.job, case.costs
    recompute = fleets.recompute_of(job)
    states = fleets.state_bytes_per_parameter(job)
    layer_ms: dict[Key, tuple[float, ...]] = {}
    layer_mb: dict[Key, tuple[float, ...]] = {}
    tp_max = 1
    for fleet in kinds:
        for t in fleets.tp_degrees(case, max(size for _, size in fleet.machines)):
            tp_max = max(tp_max, t)
            for b in SAMPLES:
                times = costs.times(fleet.gpu, tp=t, samples=b)
                again = times.forward.copy() if recompute == "full" else 0 * times.forward
                again[-1] = 0.0  # The head has nothing to recompute.
                seconds = times.forward + times.backward + again
                held = states * costs.parameters(t)
                held = held + costs.kept_bytes(tp=t, samples=b, recompute=recompute)
                layer_ms[fleet.gpu, t, b] = tuple(float(s) * 1e3 for s in seconds)
                layer_mb[fleet.gpu, t, b] = tuple(float(h) / MB for h in held)
    parameters = [float(p) for p in costs.parameters(1)]
    step = costs.times(kinds[0].gpu, tp=1, samples=1).optimizer_s_per_parameter * sum(parameters)
    return Inputs(
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
        samples_max=max(SAMPLES),
    )


def _nodes(case: Case, kinds: Sequence[Fleet]) -> tuple[Node, ...]:
    """One node per machine; its way out is as fast as that to the worst connected of all others."""
    places = tuple(dict.fromkeys(place for fleet in kinds for place, _ in fleet.machines))
    unit = 1e3 * BYTES_PER_MS
    out = {
        place: min(bytes_per_s_between(case, place, other) for other in places) for place in places
    }
    return tuple(
        Node(
            fleet.gpu,
            size,
            bytes_per_s_within(case, place) / unit,
            out[place] / unit,
            case.sites.capacity_bytes(place) / MB,
        )
        for fleet in kinds
        for place, size in fleet.machines
    )


def to_plan(own: OwnPlan, inputs: Inputs, job: Job, kinds: Sequence[Fleet]) -> Plan | str:
    """The plan in common terms, or why it has no such form.

    Equal replicas become as many pipelines as all stages allow; uneven shares of a mixed group
    stay one pipeline of split stages.
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
                Stage(layers, t, tuple(places[mine]), fleets.recompute_of(job), _smallest(split))
            )
    counts = fleets.even_counts(job, size=samples // pipelines, pipelines=pipelines)
    if isinstance(counts, str):
        return counts
    assert counts == [own.batches] * pipelines, counts
    return Plan(samples // pipelines, tuple(map(Pipeline, counts, map(tuple, rows))))


def _shares(
    inputs: Inputs, kinds: Sequence[str], strategy: Strategy, samples: int
) -> tuple[int, ...]:
    """What each replica of a stage takes of a micro batch, in samples."""
    if len(set(kinds)) == 1:
        return (samples // strategy[0],) * strategy[0]
    return tuple(share for _, share in replica_shares(inputs, kinds, strategy, samples))


def _smallest(split: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(share // math.gcd(*split) for share in split)


@dataclass(frozen=True, slots=True)
class MetisPlanner:
    """Metis on all GPU kinds of a cluster at once."""

    groups_max: int = 16
    """Device groups tried per order of kinds and number of stages, in place of a time limit."""
    name: str = "metis"

    def proposals(self, case: Case, mode: Mode) -> list[Proposal]:
        """The plans for all orders of the GPU kinds, best first by Metis' estimate."""
        kinds = fleets.fleets_of(case)
        if not kinds:
            return []
        inputs = inputs_from(case, kinds, mode=mode)
        # Layers' times are whole here, so that zero is the true sync time and not a missing one.
        repairs = FIXED if mode == "fixed" else replace(PUBLISHED, zero_sync=True)
        gpus = sum(fleet.gpus for fleet in kinds)
        return fleets.ranked(
            (gpus, fleets.proposal(own.ms / 1e3, to_plan(own, inputs, case.job, kinds)))
            for own in search(inputs, repairs=repairs, groups_max=self.groups_max)
        )
