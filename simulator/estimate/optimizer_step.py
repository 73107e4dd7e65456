"""The end of a step: the optimizer's seconds, and the vote of all ranks."""

from __future__ import annotations

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.estimate.device_groups import DeviceGroups, range_sums
from simulator.estimate.machine_layout import MachineLayout
from simulator.estimate.zero1_owners import owned_most
from simulator.hardware.runtime_constants import uses_gloo
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.network.network import Network


def optimizer_seconds(groups: DeviceGroups, costs: LayerCosts) -> Floats:
    """Return each group's optimizer seconds; with ZeRO-1, holders share the update."""
    if costs.job.zero == 0:
        return whole_update_seconds(groups, costs)
    if len(groups.outer_parts) > 1:
        seconds = np.empty(len(groups))
        for part, rows in groups.outer_parts:
            seconds[rows] = optimizer_seconds(DeviceGroups.of(part), costs)
        return seconds
    if costs.has_owners:
        owned_s: Floats = owned_most(groups, costs).updated * _per_parameter(groups, costs)
        return owned_s
    return _update_seconds(groups, costs, groups.holders(costs.layer_count))


def whole_update_seconds(groups: DeviceGroups, costs: LayerCosts) -> Floats:
    """Return the optimizer seconds of each group for all parameters that it holds."""
    return _update_seconds(groups, costs, np.ones(costs.layer_count))


def vote_seconds(layout: MachineLayout, network: Network, rows: Ints) -> float:
    """Return the seconds of the small all-reduce that ends a step, of all ranks of some rows.

    At each step of gloo's ring all ranks wait for the slowest hop. For other transports this time
    is part of the runtime's fitted ``iteration_s``.
    """
    groups, nodes = layout.groups, layout.node
    rows = rows[groups.owner[rows] == rows]
    if not all(uses_gloo(place.gpu) for place in groups.place_kinds):
        return 0.0
    hops = {
        (groups.place_kinds[groups.place_kind[a]], groups.place_kinds[groups.place_kind[b]])
        for a, b in zip(rows, np.roll(rows, -1), strict=True)
        if nodes[a] != nodes[b]
    }
    latency = network.latency
    slowest = max((latency(a, b) + latency(b, a) for a, b in hops), default=0.0)
    return float(2 * (int(groups.tp[rows].sum()) - 1) * slowest)


def _per_parameter(groups: DeviceGroups, costs: LayerCosts) -> Floats:
    seconds = [
        costs.times(gpu, tp=tp, samples=samples).optimizer_s_per_parameter
        for gpu, tp, samples in groups.timed
    ]
    return np.array(seconds)[groups.timing]


def _update_seconds(groups: DeviceGroups, costs: LayerCosts, holders: Floats) -> Floats:
    """Return the seconds to update each group's share, each layer shared by its ``holders``."""
    count, tied = np.empty(len(groups)), np.empty(len(groups))
    for tp in np.unique(groups.tp).tolist():
        rows = np.flatnonzero(groups.tp == tp)
        stepped = costs.parameters(tp) / holders
        count[rows] = range_sums(stepped, groups.first[rows], groups.end[rows])
        tied[rows] = costs.tied_parameters(tp) / holders[-1]
    count = groups.sum_by_owner(count)
    # A group with embedding and head holds their shared tensor once.
    count -= groups.holds_both_ends(costs.layer_count) * tied
    seconds: Floats = count * _per_parameter(groups, costs)
    return seconds
