"""Predicts what is transferred before a placed plan runs: sources, targets, bytes, and lost state.

Workers choose their sources themselves (`Assignment.sources`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.replan.nodes import PlannerNode
from planner.replan.state_map import (
    TrainingState,
    held_by_node,
    layers_of,
    overlap,
    placed_groups,
    spans_by_device,
)
from simulator.arrays import prefix_sums
from simulator.network.network import Network
from simulator.spec.plan import Place, PlaceKey, Plan

PIECE_BYTES = 64 * 2**20
"""State is transferred in pieces of about this size."""


def place_of(key: PlaceKey) -> Place:
    """The place without a node."""
    return Place(*key)


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Dollars per byte between machines, each computed once."""

    network: Network
    usd_per_s: float
    """Dollars per second of downtime: the rent of the waiting machines."""
    _known: dict[tuple[PlaceKey, PlaceKey], float] = field(default_factory=dict)

    def usd_per_byte(self, source: PlaceKey, target: PlaceKey) -> float:
        """Rent during the transfer of a byte, plus egress."""
        key = (source, target)
        found = self._known.get(key)
        if found is None:
            seconds = self.network.between_nodes(
                place_of(source), place_of(target), flows=1, bytes_each=PIECE_BYTES
            )
            egress = self.network.egress_usd_per_byte(source[2], target[2])
            found = self._known[key] = self.usd_per_s * seconds / PIECE_BYTES + egress
        return found


@dataclass(frozen=True, slots=True)
class Transfer:
    """State that one node fetches from another."""

    source: str
    target: str
    layers: tuple[int, ...]
    size_bytes: float


@dataclass(frozen=True, slots=True)
class RestoreTransfer:
    """State that no live node holds; it comes from a replica, a snapshot or a checkpoint."""

    target: str
    layers: tuple[int, ...]
    size_bytes: float


@dataclass(frozen=True, slots=True)
class Transfers:
    """All transfers for a new plan, and the bytes that need none."""

    between_nodes: tuple[Transfer, ...]
    restored: tuple[RestoreTransfer, ...]
    lost_layers: tuple[int, ...]
    """Layers that no live node holds."""
    own_device_bytes: float
    """Bytes that are already on the device that needs them."""
    same_node_bytes: float
    """Bytes on another device of the node, or fetched to the node for another device."""

    @property
    def network_bytes(self) -> float:
        """Bytes sent between nodes."""
        return sum(transfer.size_bytes for transfer in self.between_nodes)

    @property
    def restored_bytes(self) -> float:
        """Bytes restored from a replica, snapshot or checkpoint."""
        return sum(restore.size_bytes for restore in self.restored)


def transfers_of(
    plan: Plan,
    nodes: Sequence[PlannerNode],
    *,
    running: Plan | None,
    state: TrainingState,
    routes: Routes,
) -> Transfers:
    """Choose a source for each unit that a node lacks: the cheapest; ties to the least loaded."""
    held = held_by_node(running, nodes, state)
    needed = held_by_node(plan, nodes, state)
    by_id = {node.id: node for node in nodes}
    holders: dict[int, list[str]] = {
        unit: [name for name in sorted(held) if held[name][unit]]
        for unit in range(len(state.bytes_by_unit))
    }
    sent: defaultdict[str, float] = defaultdict(float)
    moves: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    restored: defaultdict[str, list[int]] = defaultdict(list)
    lost: set[int] = set()
    for target in sorted(needed):
        key = by_id[target].key
        for unit in np.flatnonzero(needed[target] & ~held[target]).tolist():
            size = float(state.bytes_by_unit[unit])
            if not size:
                continue
            if not holders[unit]:
                restored[target].append(unit)
                lost.add(unit)
                continue
            source = min(
                holders[unit],
                key=lambda name: (routes.usd_per_byte(by_id[name].key, key), sent[name], name),
            )
            sent[source] += size
            moves[source, target].append(unit)
    own, total = _device_bytes(plan, running, state)
    network = tuple(
        Transfer(source, target, _layers(units, state), _size(units, state))
        for (source, target), units in sorted(moves.items())
    )
    restores = tuple(
        RestoreTransfer(target, _layers(units, state), _size(units, state))
        for target, units in sorted(restored.items())
    )
    elsewhere = sum(t.size_bytes for t in network) + sum(r.size_bytes for r in restores)
    return Transfers(
        network, restores, _layers(lost, state), own, max(0.0, total - own - elsewhere)
    )


def bytes_between_zones(
    transfers: Transfers, nodes: Iterable[PlannerNode]
) -> dict[tuple[str, str], float]:
    """Bytes sent between zones, by (from, to)."""
    zone = {node.id: node.zone for node in nodes}
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for transfer in transfers.between_nodes:
        ends = zone[transfer.source], zone[transfer.target]
        if ends[0] != ends[1]:
            found[ends] += transfer.size_bytes
    return dict(sorted(found.items()))


def _layers(units: Iterable[int], state: TrainingState) -> tuple[int, ...]:
    """The layers of some units; the tensor shared by embedding and head counts as layer 0."""
    return tuple(sorted({0 if unit == state.layer_count else unit for unit in units}))


def _size(units: Iterable[int], state: TrainingState) -> float:
    return float(sum(state.bytes_by_unit[unit] for unit in units))


def _device_bytes(plan: Plan, running: Plan | None, state: TrainingState) -> tuple[float, float]:
    """Bytes that devices need and already hold, and all bytes that they need."""
    atoms = state.atoms((plan, running))
    layer_bytes = prefix_sums(state.bytes_by_unit)
    had = spans_by_device(running, atoms) if running is not None else {}
    own = total = 0.0
    for stages, place in placed_groups(plan):
        assert place.node is not None
        share, layers = atoms // stages[0].tp, layers_of(stages)
        for rank, device in enumerate(place.devices):
            span = had.get((place.node, device))
            wanted = (layers, (rank * share, (rank + 1) * share))
            # Both are rounded alike: nothing moves if every device has what it needs.
            own += overlap(span, wanted, layer_bytes, atoms)
            total += overlap(wanted, wanted, layer_bytes, atoms)
    return own, total
