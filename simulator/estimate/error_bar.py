"""The error bar of an iteration: of its passes and its links, by what each takes, and of the rest.

A link whose time is known to within 30 % matters little where messages take a hundredth of the
iteration. Links take no more than the messages and gradient sums of a plan add up to, and no more
than the busiest device group waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from simulator.arrays import Floats
from simulator.estimate.device_groups import distinct_rows
from simulator.estimate.machine_layout import MachineLayout
from simulator.estimate.stage_times import PlanTimes
from simulator.hardware.runtime_constants import is_fitted, platform_of
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.network.network import Network
from simulator.spec.plan import Place
from simulator.spec.provenance import Provenance, weakest

SHARE_MIN = 0.01
"""Links that take less of an iteration are not named as its source."""


def iteration_provenance(
    work: PlanTimes,
    costs: LayerCosts,
    network: Network,
    *,
    iteration_s: float,
    busiest_s: float,
    sums_s: float,
) -> tuple[Provenance, float]:
    """Return the weakest source of an iteration and its error bar, and that of its passes alone.

    ``busiest_s`` is what the busiest device group computes, ``sums_s`` what gradient sums take.
    """
    groups = work.layout.groups
    passes = weakest(_passes(work.layout, costs))
    links = list(_links(work.layout, network))
    error, parts = passes.relative_error, [passes]
    if links:
        link = weakest(links)
        waits_s = min(iteration_s - busiest_s, sums_s + _messages_s(work))
        share = min(max(waits_s / iteration_s, 0.0), 1.0)
        error = (1 - share) * error + share * link.relative_error
        if share >= SHARE_MIN:
            parts.append(link)
    found = weakest(parts)
    kinds_used = sorted({place.gpu for place in groups.places})
    unfitted = tuple(
        f"{gpu}: launch and framework overheads are assumed, not fitted (docs/accuracy.md)"
        for gpu in kinds_used
        if not is_fitted(gpu)
    )
    residual = max(platform_of(gpu).residual for gpu in kinds_used)
    provenance = Provenance(found.source, error + residual, (*found.notes, *unfitted))
    return provenance, passes.relative_error + residual


def _passes(layout: MachineLayout, costs: LayerCosts) -> Iterator[Provenance]:
    """Yield the provenance of each kind of passes, in the order of their first device groups."""
    groups = layout.groups
    rows, _ = distinct_rows(groups.timing)
    for row in sorted(rows.tolist()):
        gpu, tp, samples = groups.timed[groups.timing[row]]
        yield costs.provenance(gpu, tp=tp, samples=samples)


def _links(layout: MachineLayout, network: Network) -> Iterator[Provenance]:
    """Yield the provenance of links between neighbouring stages, and between pipelines."""
    groups, node = layout.groups, layout.node
    heads = np.flatnonzero(groups.index == 0)
    near = np.flatnonzero(groups.pipeline[heads[1:]] == groups.pipeline[heads[:-1]])
    one, other = heads[near], heads[near + 1]
    apart = node[one] != node[other]
    one, other = one[apart], other[apart]
    rows, _ = distinct_rows(groups.place_kind[one], groups.place_kind[other])
    for row in sorted(rows.tolist()):
        ends = (groups.place_kinds[groups.place_kind[end[row]]] for end in (one, other))
        yield network.between_nodes_source(*ends)
    # Gradient sums: within each kind of place that has a stage on several nodes, and between them.
    rows, _ = distinct_rows(groups.stage[heads], groups.place_kind[heads], node[heads])
    found = np.stack([groups.stage[heads[rows]], groups.place_kind[heads[rows]]])
    kinds, nodes = np.unique(found, axis=1, return_counts=True)
    by_stage: dict[int, list[Place]] = {}
    for stage, kind, count in zip(*kinds.tolist(), nodes.tolist(), strict=True):
        at = groups.place_kinds[kind]
        by_stage.setdefault(stage, []).append(at)
        if count > 1:
            yield network.between_nodes_source(at, at)
    for places in by_stage.values():
        for here, there in pairwise(sorted(places, key=repr)):
            yield network.between_nodes_source(here, there)


def _messages_s(work: PlanTimes) -> float:
    """Return the seconds of all messages between nodes of the pipeline that sends longest."""
    groups, node = work.layout.groups, work.layout.node
    source, target = groups.hops.source, groups.hops.target
    each: Floats = work.channels.activation_s + work.channels.gradient_s
    seconds = each * groups.micro_batches[source] * (node[source] != node[target])
    return float(np.bincount(groups.pipeline[source], weights=seconds).max(initial=0.0))
