"""Transfer times of the messages between neighbouring stages.

The ranks of a stage share their machine's NIC. Each rank receives the whole tensor, or its share,
and then the receiver's ranks gather the whole inside their machine, as the runtime does. Ranks that
share tokens send each other their own between stages of one TP degree; else they gather the whole
before they send. Contention is static: it depends only on the plan, not on the moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.arrays import Bools, Floats, Ints
from simulator.estimate.device_groups import DeviceGroups, distinct_rows
from simulator.estimate.machine_layout import MachineLayout
from simulator.network.network import Network
from simulator.spec.plan import Place


@dataclass(frozen=True, slots=True)
class ChannelTime:
    """Seconds of one direction between two device groups: transfer, and gathers at both ends."""

    transfer_s: float
    gather_s: float
    before_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ChannelTimes:
    """Seconds of every hop of a plan, one entry per hop."""

    activation_s: Floats
    gradient_s: Floats
    gather_activation_s: Floats
    """What the target gathers after it has received."""
    gather_gradient_s: Floats
    """What the source gathers after it has received."""
    before_activation_s: Floats
    """What the source gathers before it sends."""
    before_gradient_s: Floats
    """What the target gathers before it sends."""


@dataclass(frozen=True, slots=True, eq=False)
class Contention:
    """How many flows of the plan share each machine's NIC and each pair of zones.

    Activations and gradients alternate, so the directions do not contend with each other; flows
    of one direction that leave the same machine do.
    """

    flows: Ints
    """Per hop, the flows that share the busier end of its link, its own included."""
    rivals: Ints
    """Per hop, the tensors sent between the same two zones, its own included."""

    @classmethod
    def of(
        cls, layout: MachineLayout, senders: Ints, receivers: Ints, *, whole: Bools
    ) -> Contention:
        """Count the flows of one direction, given the sending and receiving rows of the hops.

        ``whole``: as by ``sent_whole``.
        """
        groups = layout.groups
        source, target = layout.node[senders], layout.node[receivers]
        leaves = source != target
        tensors = tensors_sent(groups.tp[receivers], whole) * leaves
        shares = np.minimum(groups.tp[senders], groups.tp[receivers]) * leaves
        width = np.where(whole, tensors, shares)
        count = len(layout.nodes)
        out_of = np.bincount(source, weights=width, minlength=count).astype(np.int64)
        into = np.bincount(target, weights=width, minlength=count).astype(np.int64)
        zones = len(groups.zones)
        pair = groups.zone[senders] * zones + groups.zone[receivers]
        between = np.bincount(pair, weights=tensors, minlength=zones * zones).astype(np.int64)
        return cls(np.maximum(out_of[source], into[target]), between[pair])


def shares_sent(groups: DeviceGroups) -> Bools:
    """Return for which hops ranks that share tokens send each other their own."""
    hops, tp = groups.hops, groups.tp
    alike: Bools = (tp[hops.source] == tp[hops.target]) & (tp[hops.source] > 1)
    return alike & groups.plan.sequence_parallel


def sent_whole(groups: DeviceGroups, *, sends_whole: bool) -> Bools:
    """Return for which hops each rank receives the whole tensor, if the runtime sends it so."""
    return ~shares_sent(groups) & sends_whole


def tensors_sent(receiver_tp: Ints, whole: Bools) -> Ints:
    """Return how often a tensor is sent to device groups of these TP degrees."""
    return np.where(whole, receiver_tp, 1)


ChannelKey = tuple[
    tuple[str, str, str], int, tuple[str, str, str], int, float, bool, bool, bool, int, int
]
"""(sender, its TP, receiver, its TP, bytes, on one machine, sent whole, sent by ranks that share
tokens, flows, rivals)."""


class MessageTimes:
    """Computes the seconds of every kind of channel once, for all plans."""

    def __init__(self, network: Network, *, sends_whole: bool) -> None:
        self.network, self.sends_whole = network, sends_whole
        self._found: dict[ChannelKey, ChannelTime] = {}

    def channels(self, layout: MachineLayout, *, bytes_per_sample: Floats) -> ChannelTimes:
        """Return the seconds of every hop, given the bytes per sample that each carries."""
        groups, hops = layout.groups, layout.groups.hops
        same = layout.node[hops.source] == layout.node[hops.target]
        capped = self._is_capped(layout)
        whole = sent_whole(groups, sends_whole=self.sends_whole)
        shares_tokens = groups.plan.sequence_parallel
        # Ignore what does not matter: contention inside a machine, and rivals between zones
        # without a bandwidth limit.
        loads = [
            column
            for ends in ((hops.source, hops.target), (hops.target, hops.source))
            for on in [Contention.of(layout, *ends, whole=whole)]
            for column in (np.where(same, 0, on.flows), np.where(same | ~capped, 0, on.rivals))
        ]
        sizes, size = np.unique(bytes_per_sample * hops.samples, return_inverse=True)
        columns = (
            groups.place_kind[hops.source],
            groups.tp[hops.source],
            groups.place_kind[hops.target],
            groups.tp[hops.target],
            size,
            same.astype(np.int64),
            whole.astype(np.int64),
            *loads,
        )
        rows, kind = distinct_rows(*columns)
        names = [place.key for place in groups.place_kinds]
        found = []
        for a, tp_a, b, tp_b, which, is_same, is_whole, *load in zip(
            *(column[rows].tolist() for column in columns), strict=True
        ):
            one, other = (names[a], tp_a), (names[b], tp_b)
            about = float(sizes[which]), bool(is_same), bool(is_whole), shares_tokens
            ahead = self._channel((*one, *other, *about, load[0], load[1]))
            back = self._channel((*other, *one, *about, load[2], load[3]))
            found.append(
                (
                    *(ahead.transfer_s, back.transfer_s),
                    *(ahead.gather_s, back.gather_s),
                    *(ahead.before_s, back.before_s),
                )
            )
        table = np.array(found).reshape(-1, 6)
        return ChannelTimes(*np.ascontiguousarray(table[kind].T))

    def _channel(self, key: ChannelKey) -> ChannelTime:
        if key not in self._found:
            self._found[key] = _channel_time(self.network, key)
        return self._found[key]

    def _is_capped(self, layout: MachineLayout) -> Ints:
        """Whether the two zones of each hop have a bandwidth limit."""
        groups, hops = layout.groups, layout.groups.hops
        caps = np.array(
            [[(a, b) in self.network.zone_caps or (b, a) in self.network.zone_caps
              for b in groups.zones] for a in groups.zones]
        )  # fmt: skip
        capped: Ints = caps[groups.zone[hops.source], groups.zone[hops.target]]
        return capped


def _channel_time(network: Network, key: ChannelKey) -> ChannelTime:
    sender, receiver = Place(*key[0]), Place(*key[2])
    _, senders, _, receivers, size, same, whole, shares_tokens, shared, rivals = key
    pairs = min(senders, receivers)
    if same:
        each = size * (receivers if whole else 1) / pairs
        transfer = network.within_node(sender, gpus=2 * pairs, bytes_each=each)
    else:
        # The pair's own flows carry the bytes; other flows take their share of the NIC.
        transfer = network.between_nodes(
            sender,
            receiver,
            flows=max(shared, receivers if whole else pairs),
            bytes_each=size if whole else size / pairs,
            zone_bytes=rivals * size,
        )
    if shares_tokens:
        alike = senders == receivers
        before = 0.0 if alike else network.all_gather(sender, gpus=senders, total_bytes=size)
        return ChannelTime(transfer, 0.0, before)
    if whole:
        return ChannelTime(transfer, 0.0)
    return ChannelTime(transfer, network.all_gather(receiver, gpus=receivers, total_bytes=size))
