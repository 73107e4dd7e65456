"""The cost of moving a running job to another plan: seconds by phase, dollars, repeated steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from planner.replan.nodes import PlannerNode
from planner.replan.past_moves import PastMove, corrected, phase_factors
from planner.replan.state_map import TrainingState, layers_of, placed_groups
from planner.replan.transfers import Transfers, bytes_between_zones, place_of
from simulator.network.network import Network
from simulator.spec.plan import PlaceKey, Plan


@dataclass(frozen=True, slots=True)
class MoveTimes:
    """Durations that do not depend on the plan; replace them by measured ones.

    The defaults are what the phases took with 4 to 8 processes on one machine (broken connections,
    groups, first collectives), rounded up.
    """

    probe_s: float = 0.2
    """A broken connection is believed once the node's agent has not answered for this long."""
    coalesce_s: float = 0.1
    """Losses within this window are handled together."""
    replan_s: float = 0.05
    abort_s: float = 0.5
    """Time to abort waiting collectives and return the ranks to their agents."""
    copy_bytes_per_s: float = 10e9
    """Rate of copies between a device and its host's memory."""
    restore_bytes_per_s: float = 0.5e9
    """Rate at which one node reads from a replica or a checkpoint."""
    groups_s: float = 0.3
    """Time to create all process groups, beside the round trips."""
    group_s_per_node: float = 0.005
    """Additional rendezvous time per node."""
    meeting_round_trips: int = 14
    """Round trips on the longest link: 7 to the first rank's store, 7 to connect peer monitors."""
    group_round_trips: int = 7
    """Round trips for each process group: a barrier, the addresses, connections of all pairs."""
    check_bytes_per_s: float = 5e9
    """Rate of checksums over the loaded state."""
    collectives_s: float = 0.3
    """Time of one trial collective in each group."""
    first_step_slower: float = 0.5
    """Share by which the first iteration is slower, with cold caches and allocators."""
    snapshot_every_steps: int = 1
    """Steps between snapshots; steps since the last one are repeated after a loss."""
    past: tuple[PastMove, ...] = ()
    """Moves that were measured on this cluster; they correct the phases."""


DEFAULT_TIMES = MoveTimes()


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds by phase, in order, as a reconfiguration's are measured; the job trains in some."""

    detect_s: float
    plan_s: float
    quiesce_s: float
    fetch_s: float
    rebuild_s: float
    verify_s: float
    first_step_s: float

    @property
    def total_s(self) -> float:
        """All phases together."""
        return float(sum(self.by_name.values()))

    @property
    def by_name(self) -> dict[str, float]:
        """Seconds under the names of the measured phases."""
        return {f.name.removesuffix("_s"): getattr(self, f.name) for f in fields(self)}

    def corrected(self, factors: Mapping[str, float]) -> Phases:
        """Return the phases as earlier moves correct them."""
        found = corrected(self.by_name, factors)
        return Phases(**{f"{name}_s": seconds for name, seconds in found.items()})


@dataclass(frozen=True, slots=True)
class MoveCost:
    """The predicted cost of a move."""

    phases: Phases
    uncorrected: Phases
    """The phases before correction by earlier moves."""
    steps_lost: float
    """Iterations of the old plan that are repeated, on average."""
    step_s: float
    """Seconds of an iteration of the old plan."""
    trained_s: float
    """Seconds of the phases in which steps are done: the last of the old plan, if the move is
    planned, and the first of the new one."""
    egress_usd: float
    rent_usd: float | None
    """Rent of the new plan's machines during the downtime; ``None`` where a price is unknown."""

    @property
    def seconds(self) -> float:
        """Training time lost to the move."""
        return self.downtime_s + self.steps_lost * self.step_s

    @property
    def downtime_s(self) -> float:
        """All phases, without the steps that are done in them."""
        return self.phases.total_s - self.trained_s

    def to_json(self) -> dict[str, Any]:
        phases = {f.name: getattr(self.phases, f.name) for f in fields(self.phases)}
        return {
            "seconds": self.seconds,
            "downtime_s": self.downtime_s,
            "phases": phases,
            "uncorrected": {f"{k}_s": v for k, v in self.uncorrected.by_name.items()},
            "trained_s": self.trained_s,
            "steps_lost": self.steps_lost,
            "egress_usd": self.egress_usd,
            "rent_usd": self.rent_usd,
        }


def cost_of_move(
    plan: Plan,
    transfers: Transfers,
    nodes: Sequence[PlannerNode],
    *,
    state: TrainingState,
    network: Network,
    old_iteration_s: float,
    new_iteration_s: float,
    is_planned: bool,
    usd_per_hour: float | None,
    times: MoveTimes = DEFAULT_TIMES,
) -> MoveCost:
    """Predict a move: a planned one stops between two steps, a loss repeats steps."""
    most = _largest_device_bytes(plan, state)
    seal_s = most / times.copy_bytes_per_s
    # Devices that keep their state need not load it again.
    is_moved = transfers.between_nodes or transfers.restored or transfers.same_node_bytes > 0
    load_s = seal_s if is_moved else 0.0
    is_alone = plan.device_count == 1
    # Groups are made while the state is fetched.
    meet_s = 0.0 if is_alone else _meet_seconds(plan, network, times)
    fetch_s = max(fetch_seconds(transfers, nodes, network, times), meet_s)
    collectives_s = 0.0 if is_alone else times.collectives_s
    plain = Phases(
        detect_s=0.0 if is_planned else times.probe_s + times.coalesce_s,
        # Before a planned move the search runs while training goes on.
        plan_s=0.0 if is_planned else times.replan_s,
        # A planned move stops at the end of the step, half of which is left on average, and seals
        # a snapshot on each device; after a loss, collectives are aborted.
        quiesce_s=old_iteration_s / 2 + seal_s if is_planned else times.abort_s,
        fetch_s=fetch_s,
        rebuild_s=load_s,
        verify_s=most / times.check_bytes_per_s + collectives_s,
        first_step_s=(1 + times.first_step_slower) * new_iteration_s,
    )
    phases = plain.corrected(phase_factors(times.past, is_planned=is_planned))
    trained_s = min(new_iteration_s, phases.first_step_s)
    if is_planned:
        trained_s += min(old_iteration_s / 2, phases.quiesce_s)
    # A loss hits the job mid-step on average, and halfway between two snapshots.
    steps_lost = 0.0 if is_planned else 0.5 + (times.snapshot_every_steps - 1) / 2
    egress = sum(
        size * network.egress_usd_per_byte(*zones)
        for zones, size in bytes_between_zones(transfers, nodes).items()
    )
    rent = None if usd_per_hour is None else usd_per_hour * (phases.total_s - trained_s) / 3600
    return MoveCost(phases, plain, steps_lost, old_iteration_s, trained_s, egress, rent)


def _meet_seconds(plan: Plan, network: Network, times: MoveTimes) -> float:
    """How long the ranks take to find each other and to open their groups."""
    places = list(dict.fromkeys(place for _, place in placed_groups(plan)))
    nodes = {place.node for place in places}
    here = places[0]
    round_trip_s = max(
        (network.latency(here, place) + network.latency(place, here)
         for place in {each.without_node for each in places if each.node != here.node}),
        default=0.0,
    )  # fmt: skip
    groups = 1 + max(map(plan.group_count, plan.pipelines))
    trips = times.meeting_round_trips + times.group_round_trips * groups
    return times.groups_s + times.group_s_per_node * len(nodes) + trips * round_trip_s


def fetch_seconds(
    transfers: Transfers, nodes: Sequence[PlannerNode], network: Network, times: MoveTimes
) -> float:
    """How long the busiest network card or link takes, all transfers running at once."""
    key = {node.id: node.key for node in nodes}
    by_zones = bytes_between_zones(transfers, nodes)
    ends: defaultdict[tuple[str, str], defaultdict[PlaceKey, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for transfer in transfers.between_nodes:
        ends["in", transfer.target][key[transfer.source]].append(transfer.size_bytes)
        ends["out", transfer.source][key[transfer.target]].append(transfer.size_bytes)
    slowest = 0.0
    for (way, node), peers in sorted(ends.items()):
        busy = 0.0
        for peer, sizes in sorted(peers.items()):
            source, target = (peer, key[node]) if way == "in" else (key[node], peer)
            busy += network.between_nodes(
                place_of(source),
                place_of(target),
                flows=len(sizes),
                bytes_each=sum(sizes) / len(sizes),
                zone_bytes=by_zones.get((source[2], target[2]), 0.0),
            )
        slowest = max(slowest, busy)
    restored: defaultdict[str, float] = defaultdict(float)
    for restore in transfers.restored:
        restored[restore.target] += restore.size_bytes
    from_store = max(restored.values(), default=0.0) / times.restore_bytes_per_s
    return max(slowest, from_store)


def _largest_device_bytes(plan: Plan, state: TrainingState) -> float:
    """The most state that one device of the plan holds."""
    return max(
        sum(float(state.bytes_by_unit[first:end].sum()) for first, end in layers) / tp
        for layers, tp in {(layers_of(each), each[0].tp) for each, _ in placed_groups(plan)}
    )
