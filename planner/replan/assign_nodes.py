"""Assigns a plan's device groups to nodes such that the least state moves.

Each pool is a problem of its own, because the plan already says which layers run in which zone and
machine type. Groups with equal layers are equal, and so are nodes that hold the same state and have
equally many free devices; the rest is a small min-cost flow. A group that runs already stays where
it is unless moving it makes room or saves bytes. Where the plan places pipelines together
(``Plan.together``), the groups that share a machine by it are assigned as one, if there is room.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.replan.min_cost_flow import cheapest_flow
from planner.replan.nodes import PlannerNode, natural_order, unplaced
from planner.replan.state_map import (
    Layers,
    LayerSpan,
    TrainingState,
    devices_left,
    held_by_node,
    layers_of,
    overlap,
    spans_by_device,
)
from planner.replan.transfers import Routes
from simulator.arrays import Bools, Floats, prefix_sums
from simulator.estimate.machine_layout import lay_out
from simulator.spec.plan import Pipeline, Place, PlaceKey, Plan, Stage


@dataclass(frozen=True, slots=True)
class _Group:
    """One device group of the plan to be placed."""

    pipeline: int
    stage: int
    """Its stage, or the first of its chunks."""
    tp: int
    layers: Layers
    home: Place | None
    """Where it runs already, if its pipeline continues unchanged."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Groups that go to one node."""

    groups: tuple[_Group, ...]
    gpus: int
    layers: Layers
    """The layers of its groups; units with equal layers are equal."""
    home: str
    """The node where all of them run already, or an empty text."""

    @classmethod
    def of(cls, groups: Sequence[_Group]) -> _Unit:
        homes = {"" if group.home is None else group.home.node or "" for group in groups}
        return cls(
            tuple(groups),
            sum(group.tp for group in groups),
            tuple(sorted({span for group in groups for span in group.layers})),
            homes.pop() if len(homes) == 1 else "",
        )


@dataclass(slots=True)
class _Room:
    """The nodes of one pool, and the groups assigned to them so far."""

    nodes: tuple[PlannerNode, ...]
    taken: Counter[str] = field(default_factory=Counter)
    """GPUs taken, by node."""
    chosen: dict[tuple[int, int], tuple[str, bool]] = field(default_factory=dict)
    """Node of each group by (pipeline, stage), and whether it is its home."""

    def put(self, unit: _Unit, node: str) -> None:
        """Assign the groups of a unit to a node."""
        self.taken[node] += unit.gpus
        for group in unit.groups:
            at_home = group.home is not None and group.home.node == node
            self.chosen[group.pipeline, group.stage] = (node, at_home)


def assign(
    plan: Plan,
    nodes: Sequence[PlannerNode],
    *,
    running: Plan | None,
    state: TrainingState,
    routes: Routes,
) -> Plan | None:
    """Place a plan on live nodes, moving as little state as possible; ``None`` if it does not fit.

    ``running`` is the placed plan whose state the nodes hold; it may name nodes that are lost.
    Pipelines of ``plan`` that already name live nodes (``with_homes``) stay there if that is best.
    """
    by_id = {node.id: node for node in nodes}
    held = held_by_node(running, nodes, state)
    groups = _groups(plan, by_id, held, state)
    at_place: defaultdict[PlaceKey, list[PlannerNode]] = defaultdict(list)
    for node in nodes:
        at_place[node.key].append(node)
    chosen: dict[tuple[int, int], tuple[str, bool]] = {}
    for key in sorted(groups):
        # Nodes on demand come before equal ones on spot, as plans are priced.
        order = [(n.spot, natural_order(n.id), n) for n in at_place[key]]
        here = tuple(node for *_, node in sorted(order))
        fetch = _FetchUsd(key, by_id, held, state, routes)
        for units, makes_room in _ways(plan, groups[key], here):
            room = _Room(here)
            if _fill(room, units, held, fetch, state, makes_room=makes_room):
                break
        else:
            return None
        chosen |= room.chosen
    return _place(plan, groups, chosen, nodes, running, state)


def keeping_places(plan: Plan, running: Plan, nodes: Sequence[PlannerNode]) -> Plan:
    """The plan in which pipelines that run already, on nodes that are up, keep their places."""
    if plan.virtual_stages != running.virtual_stages:
        # Equal stages are then other device groups.
        return replace(plan, pipelines=tuple(map(_unplace, plan.pipelines)))
    by_id = {node.id: node for node in nodes}
    alive: defaultdict[tuple[Stage, ...], list[tuple[Stage, ...]]] = defaultdict(list)
    for pipeline in running.pipelines:
        if all(stage_is_alive(stage, by_id) for stage in pipeline.stages):
            alive[tuple(map(unplaced, pipeline.stages))].append(pipeline.stages)
    pipelines = []
    for pipeline in plan.pipelines:
        equal = alive.get(tuple(map(unplaced, pipeline.stages)))
        stages = equal.pop(0) if equal else tuple(map(unplaced, pipeline.stages))
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines))


def _groups(
    plan: Plan, nodes: Mapping[str, PlannerNode], held: Mapping[str, Bools], state: TrainingState
) -> dict[PlaceKey, list[_Group]]:
    """The groups by pool, large groups first, equal groups adjacent."""
    needs: dict[Layers, Bools] = {}
    found: defaultdict[PlaceKey, list[_Group]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stages in enumerate(plan.chunks(pipeline)):
            layers, place = layers_of(stages), stages[0].place
            home = None
            if place.node is not None and stage_is_alive(stages[0], nodes):
                if layers not in needs:
                    needs[layers] = state.needs(*layers)
                # A place counts as home only if it holds the state.
                home = place if held[place.node][needs[layers]].all() else None
            group = _Group(p, s, stages[0].tp, layers, home)
            found[place.key].append(group)
    for some in found.values():
        some.sort(key=lambda group: (-group.tp, group.stage, group.layers, group.pipeline))
    return found


def _ways(
    plan: Plan, groups: list[_Group], nodes: Sequence[PlannerNode]
) -> Iterator[tuple[list[_Unit], bool]]:
    """Ways to form the units of one pool, and whether smaller units may be moved to make room.

    Closest to the plan's placement first: by machine, as the estimator lays out pipelines that do
    not run yet; then by pipeline; then by group.
    """
    if plan.together is not None and nodes and any(group.home is None for group in groups):
        yield _units(groups, _machines(plan, groups, nodes)), False
        yield _units(groups, {(g.pipeline, g.stage): g.pipeline for g in groups}), False
    yield [_Unit.of([group]) for group in groups], True


def _machines(
    plan: Plan, groups: Iterable[_Group], nodes: Iterable[PlannerNode]
) -> dict[tuple[int, int], object]:
    """The machine of each group of the pipelines that do not run yet, by the estimator's rule."""
    new = sorted({group.pipeline for group in groups if group.home is None})
    pipelines = tuple(_unplace(plan.pipelines[p]) for p in new)
    sizes = tuple((size, 1) for size in sorted((node.gpus for node in nodes), reverse=True))
    layout = lay_out(replace(plan, pipelines=pipelines), lambda *_: sizes)
    return {(new[p], s): node for (p, s, _), node in layout.node_of.items()}


def _unplace(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, stages=tuple(map(unplaced, pipeline.stages)))


def _units(groups: Iterable[_Group], machine: Mapping[tuple[int, int], object]) -> list[_Unit]:
    """One unit per machine, large units first; groups that run already are units of their own."""
    some: defaultdict[object, list[_Group]] = defaultdict(list)
    for group in groups:
        at = (group.pipeline, group.stage)
        some[at if group.home is not None else machine[at]].append(group)
    units = map(_Unit.of, some.values())
    return sorted(units, key=lambda unit: (-unit.gpus, unit.groups[0].pipeline))


def stage_is_alive(stage: Stage, nodes: Mapping[str, PlannerNode]) -> bool:
    """Whether all devices of a placed stage are still up."""
    place = stage.place
    node = nodes.get(place.node or "")
    return (
        node is not None
        and node.key == place.key
        and all(device < node.gpus for device in place.devices)
    )


@dataclass(eq=False)
class _FetchUsd:
    """Cost of fetching each unit of state to a node of one pool, from its cheapest holder."""

    target: PlaceKey
    nodes: Mapping[str, PlannerNode]
    held: Mapping[str, Bools]
    state: TrainingState
    routes: Routes

    def by_unit(self) -> Floats:
        """Dollars by unit of state."""
        at_place: dict[PlaceKey, Bools] = {}
        for name, node in self.nodes.items():
            at_place[node.key] = at_place.get(node.key, False) | self.held[name]
        best = np.full(len(self.state.bytes_by_unit), np.inf)
        dearest = 0.0
        for source, units in sorted(at_place.items(), key=lambda pair: pair[0]):
            usd = self.routes.usd_per_byte(source, self.target)
            dearest = max(dearest, usd)
            best[units] = np.minimum(best[units], usd)
        # A unit without a holder is restored, at the cost of the dearest route.
        best[np.isinf(best)] = dearest
        found: Floats = best * self.state.bytes_by_unit
        return found


def _fill(
    room: _Room,
    units: list[_Unit],
    held: Mapping[str, Bools],
    fetch: _FetchUsd,
    state: TrainingState,
    *,
    makes_room: bool,
) -> bool:
    """Give every unit of one pool a node, large units first; false if they do not fit.

    With ``makes_room``, smaller units that run already may be moved.
    """
    if all(unit.home for unit in units):
        # Nothing has to move.
        for unit in units:
            room.put(unit, unit.home)
        return True
    fetch_usd = fetch.by_unit()
    for gpus in sorted({unit.gpus for unit in units}, reverse=True):
        some = [unit for unit in units if unit.gpus == gpus]
        # Smaller units that may stay keep their devices unless the room is needed.
        smaller: Counter[str] = Counter()
        for unit in units:
            if unit.gpus < gpus and unit.home:
                smaller[unit.home] += unit.gpus
        for reserved in (smaller, Counter[str]())[: 1 + makes_room]:
            slots = [
                (node.gpus - room.taken[node.id] - reserved[node.id]) // gpus for node in room.nodes
            ]
            if sum(max(0, n) for n in slots) >= len(some):
                break
        else:
            return False
        _ship(room, some, np.maximum(np.array(slots, dtype=np.int64), 0), held, fetch_usd, state)
    return True


def _ship(
    room: _Room,
    units: list[_Unit],
    slots: np.ndarray[tuple[int], np.dtype[np.int64]],
    held: Mapping[str, Bools],
    fetch: Floats,
    state: TrainingState,
) -> None:
    """Share units of equally many GPUs out over the nodes at the least cost."""
    kinds = sorted({unit.layers for unit in units})
    row_of = {layers: row for row, layers in enumerate(kinds)}
    number = {node.id: n for n, node in enumerate(room.nodes)}
    # Nodes with equal state and equally many free slots form one column.
    columns: dict[tuple[int, bytes], int] = {}
    column_of = [
        columns.setdefault((int(slots[n]), held[node.id].tobytes()), len(columns))
        for n, node in enumerate(room.nodes)
    ]
    stays: list[_Unit] = []
    left = slots.copy()
    for unit in units:
        here = number.get(unit.home)
        if here is not None and left[here] > 0:
            left[here] -= 1
            stays.append(unit)
    needs = np.stack([state.needs(*kind) for kind in kinds])
    lacks = np.stack(
        [~np.frombuffer(units, dtype=np.bool_) for _, units in columns], axis=1
    ).astype(float)
    start = np.zeros((len(kinds), len(columns)), dtype=np.int64)
    for unit in stays:
        start[row_of[unit.layers], column_of[number[unit.home]]] += 1
    supply = np.bincount([row_of[unit.layers] for unit in units], minlength=len(kinds))
    space = np.bincount(column_of, weights=slots, minlength=len(columns)).astype(np.int64)
    flow = cheapest_flow((needs * fetch) @ lacks, supply, space, start=start)
    _hand_out(room, units, stays, flow, row_of, column_of, slots)


def _hand_out(
    room: _Room,
    units: list[_Unit],
    stays: list[_Unit],
    flow: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    row_of: Mapping[Layers, int],
    column_of: list[int],
    slots: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> None:
    """Turn a flow into a node for each unit: units at home first, then the others."""
    number = {node.id: n for n, node in enumerate(room.nodes)}
    left, settled = slots.copy(), set()
    for unit in stays:
        here = number[unit.home]
        way = (row_of[unit.layers], column_of[here])
        if flow[way] > 0:
            flow[way] -= 1
            left[here] -= 1
            settled.add(unit)
            room.put(unit, room.nodes[here].id)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for n, column in enumerate(column_of):
        members[column].append(n)
    for unit in units:
        if unit in settled:
            continue
        row = row_of[unit.layers]
        column = int(flow[row].argmax())
        flow[row, column] -= 1
        here = next(n for n in members[column] if left[n] > 0)
        left[here] -= 1
        room.put(unit, room.nodes[here].id)


def _place(
    plan: Plan,
    groups: Mapping[PlaceKey, list[_Group]],
    chosen: Mapping[tuple[int, int], tuple[str, bool]],
    nodes: Iterable[PlannerNode],
    running: Plan | None,
    state: TrainingState,
) -> Plan:
    """Choose devices on each node, and write node and devices into the plan."""
    places: dict[tuple[int, int], Place] = {}
    taken: defaultdict[str, set[int]] = defaultdict(set)
    moving = []
    for some in groups.values():
        for group in some:
            node, at_home = chosen[group.pipeline, group.stage]
            if at_home:
                assert group.home is not None
                places[group.pipeline, group.stage] = group.home
                taken[node].update(group.home.devices)
            else:
                moving.append((group, node))
    touched = {node for _, node in moving}
    free = devices_left((node for node in nodes if node.id in touched), taken)
    atoms = state.atoms((plan, running))
    spans = spans_by_device(running, atoms) if running is not None and moving else {}
    layer_bytes = prefix_sums(state.bytes_by_unit)
    for group, node in moving:
        place = unplaced(plan.pipelines[group.pipeline].stages[group.stage]).place
        devices = _devices(group, node, free[node], spans, layer_bytes, atoms)
        places[group.pipeline, group.stage] = replace(place, node=node, devices=devices)
    pipelines = tuple(
        _put_at(pipeline, [places[p, s] for s in range(plan.group_count(pipeline))])
        for p, pipeline in enumerate(plan.pipelines)
    )
    # The nodes' names give the placement now, so ``together`` says nothing more.
    return replace(plan, pipelines=pipelines, together=None)


def _put_at(pipeline: Pipeline, places: Sequence[Place]) -> Pipeline:
    """The pipeline with its device groups at these places; the same object if nothing changes."""
    there = [(stage, places[s % len(places)]) for s, stage in enumerate(pipeline.stages)]
    if all(stage.place is place for stage, place in there):
        return pipeline
    return replace(pipeline, stages=tuple(replace(s, places=(place,)) for s, place in there))


def _devices(
    group: _Group,
    node: str,
    free: list[int],
    spans: Mapping[tuple[str, int], LayerSpan],
    layer_bytes: Floats,
    atoms: int,
) -> tuple[int, ...]:
    """Devices for the ranks of a group, preferring those that hold what the rank needs."""
    share = atoms // group.tp
    pairs = []
    for rank in range(group.tp):
        wanted = (group.layers, (rank * share, (rank + 1) * share))
        for device in free:
            has = overlap(spans.get((node, device)), wanted, layer_bytes, atoms)
            pairs.append((-has, rank, device))
    chosen: dict[int, int] = {}
    for _, rank, device in sorted(pairs):
        if rank not in chosen and device in free:
            chosen[rank] = device
            free.remove(device)
    return tuple(chosen[rank] for rank in range(group.tp))
