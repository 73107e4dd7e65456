"""Transfer times of the messages between neighbouring stages.

The ranks of a stage share their machine's NIC: each sends its share of the activation, and the
receiver's ranks gather the whole inside their machine. Contention is static: it depends only on
the plan, not on the moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.estimate.device_groups import distinct_rows
from simulator.estimate.machine_layout import MachineLayout
from simulator.network.network import Network
from simulator.spec.plan import Place


@dataclass(frozen=True, slots=True)
class ChannelTime:
    """Seconds of one direction between two device groups: transfer and receiver's gather."""

    transfer_s: float
    gather_s: float


@dataclass(frozen=True, slots=True, eq=False)
class ChannelTimes:
    """Seconds of every hop of a plan, one entry per hop."""

    activation_s: Floats
    gradient_s: Floats
    gather_activation_s: Floats
    """At the target."""
    gather_gradient_s: Floats
    """At the source."""


@dataclass(frozen=True, slots=True, eq=False)
class Contention:
    """How many flows of the plan share each machine's NIC and each pair of zones.

    Activations and gradients alternate, so the directions do not contend with each other; flows
    of one direction that leave the same machine do.
    """

    flows: Ints
    """Per hop, the flows that share the busier end of its link, its own included."""
    rivals: Ints
    """Per hop, the hops between the same two zones, itself included."""

    @classmethod
    def of(cls, layout: MachineLayout) -> Contention:
        groups, hops = layout.groups, layout.groups.hops
        source, target = layout.node[hops.source], layout.node[hops.target]
        leaves = source != target
        width = np.minimum(groups.tp[hops.source], groups.tp[hops.target]) * leaves
        count = len(layout.nodes)
        out_of = np.bincount(source, weights=width, minlength=count).astype(np.int64)
        into = np.bincount(target, weights=width, minlength=count).astype(np.int64)
        zones = len(groups.zones)
        pair = groups.zone[hops.source] * zones + groups.zone[hops.target]
        between = np.bincount(pair, weights=leaves, minlength=zones * zones).astype(np.int64)
        return cls(np.maximum(out_of[source], into[target]), between[pair])


ChannelKey = tuple[tuple[str, str, str], int, tuple[str, str, str], int, float, bool, int, int]
"""(sender, its TP, receiver, its TP, bytes, on one machine, flows, rivals)."""


class MessageTimes:
    """Computes the seconds of every kind of channel once, for all plans."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._found: dict[ChannelKey, tuple[ChannelTime, ChannelTime]] = {}

    def channels(self, layout: MachineLayout, *, bytes_per_sample: Floats) -> ChannelTimes:
        """Return the seconds of every hop, given the bytes per sample that each carries."""
        groups, hops = layout.groups, layout.groups.hops
        contention = Contention.of(layout)
        same = layout.node[hops.source] == layout.node[hops.target]
        # Ignore what does not matter: contention inside a machine, and rivals between zones
        # without a bandwidth limit.
        flows = np.where(same, 0, contention.flows)
        rivals = np.where(same | ~self._is_capped(layout), 0, contention.rivals)
        sizes, size = np.unique(bytes_per_sample * hops.samples, return_inverse=True)
        columns = (
            groups.site[hops.source],
            groups.tp[hops.source],
            groups.site[hops.target],
            groups.tp[hops.target],
            size,
            same.astype(np.int64),
            flows,
            rivals,
        )
        rows, kind = distinct_rows(*columns)
        names = [site.key for site in groups.sites]
        found = []
        for a, tp_a, b, tp_b, which, is_same, shared, others in zip(
            *(column[rows].tolist() for column in columns), strict=True
        ):
            key = (names[a], tp_a, names[b], tp_b, float(sizes[which]), bool(is_same), shared,
                   others)  # fmt: skip
            both = self._found.get(key)
            if both is None:
                both = self._found[key] = (_channel_time(self.network, key), _channel_time(
                    self.network, _reversed(key)
                ))  # fmt: skip
            ahead, back = both
            found.append((ahead.transfer_s, back.transfer_s, ahead.gather_s, back.gather_s))
        table = np.array(found).reshape(-1, 4)
        return ChannelTimes(*np.ascontiguousarray(table[kind].T))

    def _is_capped(self, layout: MachineLayout) -> Ints:
        """Whether the two zones of each hop have a bandwidth limit."""
        groups, hops = layout.groups, layout.groups.hops
        caps = np.array(
            [[(a, b) in self.network.zone_caps or (b, a) in self.network.zone_caps
              for b in groups.zones] for a in groups.zones]
        )  # fmt: skip
        capped: Ints = caps[groups.zone[hops.source], groups.zone[hops.target]]
        return capped


def _reversed(key: ChannelKey) -> ChannelKey:
    """Return the key of the opposite direction, with the same contention."""
    sender, senders, receiver, receivers, size, same, flows, rivals = key
    return receiver, receivers, sender, senders, size, same, flows, rivals


def _channel_time(network: Network, key: ChannelKey) -> ChannelTime:
    sender, receiver = Place(*key[0]), Place(*key[2])
    _, senders, _, receivers, size, same, shared, rivals = key
    flows = min(senders, receivers)
    if same:
        transfer = network.within_node(sender, gpus=2 * flows, bytes_each=size / flows)
    else:
        # The pair's own flows carry the bytes; other flows take their share of the NIC.
        transfer = network.between_nodes(
            sender,
            receiver,
            flows=max(shared, flows),
            bytes_each=size / flows,
            zone_bytes=rivals * size,
        )
    return ChannelTime(transfer, network.all_gather(receiver, gpus=receivers, total_bytes=size))
