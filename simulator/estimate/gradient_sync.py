"""Gradient sync: which device groups sum which layers, its seconds and its egress bytes.

Every layer is all-reduced between all device groups that hold it, one per pipeline: as one ring, or
hierarchically, first inside each zone and then across zones. Under ZeRO-1 by buckets it is reduced
to their owners instead, around one ring. The ranks of a group run rings in parallel and share their
machine's NIC. Jobs run in one global order, layers descending, and a group runs one at a time
(gloo: one per set of ranks); the runtime uses the same order to avoid deadlocks.

All rings of a plan are built at once as columns (``simulator.estimate.sync_rings``), so that
times are computed once per kind of hop, not once per ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.estimate.device_groups import DeviceGroups, GroupId, distinct_rows
from simulator.estimate.machine_layout import MachineLayout
from simulator.estimate.sync_rings import HopColumn, HopName, RingHops, SyncRings, ring_steps
from simulator.hardware.runtime_constants import uses_gloo
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.network.network import Network
from simulator.spec.plan import Place, Plan

ZonePair = tuple[str, str]
MASTER_BYTES = 4
"""Bytes of a weight that an owner broadcasts, or that an outer step sums."""


@dataclass(frozen=True, slots=True, eq=False)
class SyncJob:
    """One sum or broadcast: some layers, over all groups that hold them."""

    layers: tuple[int, int]
    groups: DeviceGroups
    rows: Ints
    """The device groups that hold them, in ring order."""
    seconds: float
    egress_bytes: tuple[tuple[ZonePair, float], ...]
    algorithm: str
    """``"ring"``, ``"hierarchical"``, ``"reduce"`` to an owner, ``"broadcast"``, or ``"tied"``: a
    sum of a tensor of two layers."""
    broadcast: SyncJob | None = None
    """Under ZeRO-1 by buckets: the owners send the updated fp32 weights to the other holders."""

    @property
    def holders(self) -> tuple[GroupId, ...]:
        """The ids of the device groups."""
        return tuple(self.groups.ids[row] for row in self.rows.tolist())


class SumOrder:
    """Runs the sums of an iteration one after the other, as device groups are free for them.

    A group runs one at a time; gloo has a thread for each set of ranks.
    """

    def __init__(self, groups: DeviceGroups) -> None:
        self.owner = groups.owner
        self.free, self.busy = np.zeros(len(groups)), np.zeros(len(groups))
        self.runs: list[tuple[float, SyncJob]] = []
        """Each sum with its start."""
        self._by_ranks: dict[bytes, float] = {}
        self._is_gloo = all(uses_gloo(place.gpu) for place in groups.place_kinds)

    def run(self, job: SyncJob, at: float) -> None:
        """Run a sum whose gradients are all complete at ``at``."""
        holders = self.owner[job.rows]
        ranks = holders.tobytes()
        free = self._by_ranks.get(ranks, 0.0) if self._is_gloo else float(self.free[holders].max())
        start = max(0.0, at, free)
        self.runs.append((start, job))
        self._by_ranks[ranks] = start + job.seconds
        self.free[holders] = np.maximum(self.free[holders], start + job.seconds)
        # A group with a tied tensor in two chunks takes part in its all-reduce once.
        self.busy[np.unique(holders)] += job.seconds


class HopTimes:
    """Computes the seconds of a ring step for every kind of hop once, for all plans."""

    def __init__(self, costs: LayerCosts, network: Network) -> None:
        self.costs, self.network = costs, network
        self._found: dict[tuple[HopName, float, int, int, int], float] = {}

    def seconds(
        self, hop: HopName, rank_bytes: float, shards: int, abreast: int, rivals: int
    ) -> float:
        """Return the seconds of one ring step over one hop, bucket after bucket."""
        key = (hop, rank_bytes, shards, abreast, rivals)
        found = self._found.get(key)
        if found is None:
            bucket = self.costs.runtime.sync_bucket_bytes
            full, rest = divmod(rank_bytes, bucket)
            found = full * self._message_seconds(hop, bucket / shards, abreast, rivals)
            found += self._message_seconds(hop, rest / shards, abreast, rivals)
            self._found[key] = found
        return found

    def _message_seconds(self, hop: HopName, bytes_each: float, abreast: int, rivals: int) -> float:
        if bytes_each <= 0:
            return 0.0
        sender, receiver = Place(*hop[0]), Place(*hop[1])
        _, _, flows, rings, zone_rings, same_node, members = hop
        if same_node:
            # Every rank of the group sends to its counterpart in the next group, and rings of
            # other stages send beside it, though no more than the machine has GPUs.
            own = members * flows
            gpus = own * rings
            if sender.machine:
                gpus = max(own, min(gpus, self.network.machine_type(sender).gpus))
            return self.network.ring_step_within(sender, gpus=gpus, bytes_each=bytes_each)
        return self.network.ring_between_nodes(
            sender,
            receiver,
            flows=flows * rings * abreast,
            bytes_each=bytes_each,
            zone_bytes=flows * zone_rings * rivals * bytes_each,
            # Staged rings across zones count the flows of all members on a machine in ``abreast``.
            stripes=members if abreast == 1 else 1,
        )


class SyncJobs:
    """Builds the sync jobs of one plan."""

    def __init__(
        self,
        plan: Plan,
        layout: MachineLayout,
        costs: LayerCosts,
        network: Network,
        *,
        hop_times: HopTimes | None = None,
        of_weights: bool = False,
    ) -> None:
        """With ``of_weights``, fp32 weights are summed instead of gradients, and none sent back."""
        self.plan, self.layout, self.costs = plan, layout, costs
        self.hop_times = hop_times or HopTimes(costs, network)
        self.gradient_bytes = MASTER_BYTES if of_weights else costs.gradient_bytes
        self.to_owners = costs.has_owners and not of_weights

    def jobs(self, *, per_layer: bool) -> list[SyncJob]:
        """Return the jobs in global order, per layer or per run of layers with equal holders."""
        segments = self._segments()
        tied = self.costs.tied_parameters(1) > 0
        rings = SyncRings.of(self.layout, [first for first, _ in segments], with_union=tied)
        pieces: list[_Piece] = []
        for ring in reversed(range(len(segments))):
            first, end = segments[ring]
            ranges = (
                [(layer, layer + 1) for layer in reversed(range(first, end))]
                if per_layer
                else [(first, end)]
            )
            pieces += [_Piece(layers, ring, is_tied=False) for layers in ranges]
        if tied:
            pieces.append(_Piece((0, 1), len(segments), is_tied=True))
        pieces = [piece for piece in pieces if rings.size[piece.ring] > 1]
        return self._jobs(rings, pieces) if pieces else []

    def _jobs(self, rings: SyncRings, pieces: list[_Piece]) -> list[SyncJob]:
        ring = np.array([piece.ring for piece in pieces])
        carried = {
            flows: np.array([self._count_carried(piece, flows) for piece in pieces])
            for flows in rings.flow_counts()
        }
        ring_s = self._ring_seconds(rings, ring, carried)
        staged_s = self._staged_seconds(rings, ring, carried)
        broadcast_s = self._broadcast_seconds(rings, ring, carried) if self.to_owners else []
        found: list[SyncJob] = []
        for piece, one_s, other_s, parameters in zip(
            pieces, ring_s.tolist(), staged_s.tolist(), carried[1].tolist(), strict=True
        ):
            is_staged = other_s < one_s
            algorithm = "hierarchical" if is_staged else "reduce" if self.to_owners else "ring"
            algorithm = "tied" if piece.is_tied else algorithm
            # A sum to an owner goes around the ring once, half as often as an all-reduce.
            sent = parameters / 2 if self.to_owners else parameters
            egress = rings.egress(piece.ring, sent * self.gradient_bytes, staged=is_staged)
            about = piece.layers, rings.groups, rings.members(piece.ring)
            broadcast = None
            if self.to_owners:
                ahead = rings.egress(piece.ring, sent * MASTER_BYTES, staged=False)
                broadcast = SyncJob(*about, broadcast_s[len(found)], ahead, "broadcast")
            found.append(SyncJob(*about, min(one_s, other_s), egress, algorithm, broadcast))
        return found

    def _count_carried(self, piece: _Piece, ways: int) -> float:
        """Return the parameters that one of ``ways`` parallel rings carries.

        A tensor that embedding and head share has a separate job.
        """
        if piece.is_tied:
            return self.costs.tied_parameters(ways)
        first, end = piece.layers
        row = self.costs.parameters(ways)
        ends = (first == 0) + (end == self.costs.layer_count)
        return float(row[first:end].sum()) - ends * self.costs.tied_parameters(ways)

    def _segments(self) -> list[tuple[int, int]]:
        """Return the longest runs of layers with equal holders."""
        starts = np.unique(self.layout.groups.first).tolist()
        return list(pairwise([*starts, self.costs.layer_count]))

    # -- durations ------------------------------------------------------------------------------

    def _ring_seconds(self, rings: SyncRings, ring: Ints, carried: dict[int, Floats]) -> Floats:
        """Return the seconds of plain rings: all their steps over the slowest hop."""
        size, seconds = rings.size[ring], np.zeros(len(ring))
        steps = ring_steps(size, size, to_owner=self.to_owners, is_gloo=rings.has_gloo)
        for count, share, shards in steps:
            step_s = self._slowest_step_s(rings.around, ring, carried, shards=shards, share=share)
            seconds += count * step_s
        return seconds

    def _broadcast_seconds(
        self, rings: SyncRings, ring: Ints, carried: dict[int, Floats]
    ) -> list[float]:
        """Return the seconds of broadcasts: once over the slowest hop, since parts follow each
        other; under gloo, which passes whole tensors down a tree, once for each of its levels.
        """
        share = MASTER_BYTES / self.gradient_bytes
        once = self._slowest_step_s(rings.around, ring, carried, shards=1, share=share)
        levels = np.ceil(np.log2(rings.size[ring])) if rings.has_gloo else 1
        seconds: list[float] = (levels * once).tolist()
        return seconds

    def _staged_seconds(self, rings: SyncRings, ring: Ints, carried: dict[int, Floats]) -> Floats:
        """Return the seconds of hierarchical sync, infinite for rings inside one zone.

        It reduce-scatters inside each zone, all-reduces shards across zones, and all-gathers
        inside each zone.
        """
        staged = np.full(len(ring), np.inf)
        if rings.has_gloo or self.to_owners:
            return staged  # Gloo has plain rings only, and so has NCCL's reduction to one rank.
        far = np.flatnonzero(rings.zone_count[ring] > 1)
        if not len(far):
            return staged
        ring = ring[far]
        carried = {flows: values[far] for flows, values in carried.items()}
        inside = np.zeros(len(far))
        for hops, sizes in rings.inside():
            members = sizes[ring]
            steps = np.maximum(members - 1, 0)
            inside = np.maximum(
                inside,
                steps * self._slowest_step_s(hops, ring, carried, shards=np.maximum(members, 1)),
            )
        # All members of a zone send their shard at once: those of one machine share its NIC,
        # and all of them share the bandwidth between the zones.
        zones, smallest = rings.zone_count[ring], rings.smallest_zone[ring]
        across = (
            2
            * (zones - 1)
            * self._slowest_step_s(
                rings.across,
                ring,
                carried,
                shards=zones * smallest,
                abreast=np.minimum(rings.most_on_a_machine[ring], smallest),
                rivals=smallest,
            )
        )
        staged[far] = 2 * inside + across
        return staged

    def _slowest_step_s(
        self,
        hops: RingHops,
        ring: Ints,
        carried: dict[int, Floats],
        *,
        shards: Ints | int,
        abreast: Ints | int = 1,
        rivals: Ints | int = 1,
        share: Floats | float = 1.0,
    ) -> Floats:
        """Return the seconds of a step over each ring's slowest hop; 0 without hops.

        It carries a ``share`` of the gradients.
        """
        count = hops.end[ring] - hops.begin[ring]
        piece = np.repeat(np.arange(len(ring)), count)
        if not len(piece):
            return np.zeros(len(ring))
        starts = np.cumsum(count) - count
        entry = np.repeat(hops.begin[ring] - starts, count) + np.arange(len(piece))
        parts, side_by_side, others = (
            np.broadcast_to(each, len(ring))[piece] for each in (shards, abreast, rivals)
        )
        flows = hops.kind[entry, HopColumn.flows]
        each_bytes = self.gradient_bytes * np.broadcast_to(share, len(ring))
        rank_bytes = np.empty(len(piece))
        for width, values in carried.items():
            here = flows == width
            rank_bytes[here] = (values * each_bytes)[piece[here]]
        amounts, amount = np.unique(rank_bytes, return_inverse=True)
        rows, question = distinct_rows(hops.number[entry], amount, parts, side_by_side, others)
        names = hops.names
        columns = (amounts[amount[rows]], *(x[rows] for x in (parts, side_by_side, others)))
        asked = zip(hops.number[entry[rows]].tolist(), *(x.tolist() for x in columns), strict=True)
        times = self.hop_times
        seconds = np.array([times.seconds(names[number], *rest) for number, *rest in asked])
        slowest = np.zeros(len(ring))
        np.maximum.at(slowest, piece, seconds[question])
        return slowest


@dataclass(frozen=True, slots=True)
class _Piece:
    """The layers of one job, and the ring that reduces them."""

    layers: tuple[int, int]
    ring: int
    is_tied: bool
