"""Assignment to nodes: compared with all permutations on small cases, and its invariants."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from planner.replan.assign_nodes import assign, keeping_places
from planner.replan.min_cost_flow import cheapest_flow
from planner.replan.nodes import PlannerNode, nodes_used
from planner.replan.state_map import TrainingState, held_by_node
from planner.replan.transfers import Routes, transfers_of
from simulator.estimate.machine_layout import lay_out
from simulator.hardware.catalogue import load_catalogue
from simulator.network.network import MeasuredNetwork, Network
from simulator.spec.plan import Pipeline, Place, Plan, Schedule, Stage

LAYERS = 6
ZONES = ("us-central1-a", "us-west1-b")
NETWORK = Network(
    load_catalogue(),
    MeasuredNetwork(egress_usd_per_byte={(ZONES[0], ZONES[1]): 1e-8, (ZONES[1], ZONES[0]): 1e-8}),
)


def node(name: str, zone: str = ZONES[0], gpus: int = 4) -> PlannerNode:
    return PlannerNode(name, "A100-40", "A100-40x4", zone, gpus)


def state(rng: random.Random) -> TrainingState:
    return TrainingState(
        np.array([float(rng.randint(1, 9)) for _ in range(LAYERS)] + [1.0]) * 1e9, 4
    )


def routes() -> Routes:
    return Routes(NETWORK, 0.1)


def random_plan(
    rng: random.Random, room: dict[str, int], tp: int | None = None, chunks: int = 1
) -> Plan | None:
    """An unplaced plan of a few pipelines on at most ``room`` GPUs by zone."""
    left, pipelines = dict(room), []
    for _ in range(rng.randint(1, 3)):
        depth = rng.randint(1, 3) if chunks == 1 else rng.randint(2, LAYERS // chunks)
        cuts = (0, *sorted(rng.sample(range(1, LAYERS), depth * chunks - 1)), LAYERS)
        groups: list[tuple[int, Place]] = []
        for _ in range(depth):
            degree = tp or rng.choice([1, 2, 4])
            zone = rng.choice(sorted(left))
            if left[zone] < degree:
                break
            left[zone] -= degree
            groups.append((degree, Place("A100-40", "A100-40x4", zone)))
        if len(groups) == depth:
            turns = zip(itertools.pairwise(cuts), groups * chunks, strict=True)
            stages = tuple(Stage(span, degree, (place,)) for span, (degree, place) in turns)
            pipelines.append(Pipeline(depth, stages))
    if not pipelines:
        return None
    schedule: Schedule = "1f1b" if chunks == 1 else "interleaved"
    return Plan(1, tuple(pipelines), schedule, chunks)


def usd_of(
    plan: Plan, running: Plan | None, nodes: list[PlannerNode], the_state: TrainingState
) -> float:
    """What a placed plan costs to reach, unit by unit for every device group."""
    held = held_by_node(running, nodes, the_state)
    by_id = {one.id: one for one in nodes}
    dearest = max(
        routes().usd_per_byte(source.key, target.key) for source in nodes for target in nodes
    )
    total = 0.0
    for pipeline in plan.pipelines:
        for stages in plan.chunks(pipeline):
            target = stages[0].place.node or ""
            needs = np.any([the_state.needs(stage.layers) for stage in stages], axis=0)
            for unit in np.flatnonzero(needs & ~held[target]).tolist():
                ways = [
                    routes().usd_per_byte(by_id[name].key, by_id[target].key)
                    for name, units in held.items()
                    if units[unit]
                ]
                total += the_state.bytes_by_unit[unit] * min(ways, default=dearest)
    return total


def every_placement(plan: Plan, nodes: list[PlannerNode]) -> Iterator[Plan]:
    """Each way to give every device group a node of its zone."""
    depths = [plan.group_count(row) for row in plan.pipelines]
    groups = [(p, s) for p, depth in enumerate(depths) for s in range(depth)]
    options = [
        [n for n in nodes if n.zone == plan.pipelines[p].stages[s].place.zone] for p, s in groups
    ]
    for chosen in itertools.product(*options):
        used: Counter[str] = Counter()
        for (p, s), there in zip(groups, chosen, strict=True):
            used[there.id] += plan.pipelines[p].stages[s].tp
        if any(used[n.id] > n.gpus for n in nodes):
            continue
        names = dict(zip(groups, chosen, strict=True))
        yield replace(
            plan,
            pipelines=tuple(
                replace(
                    row,
                    stages=tuple(
                        replace(one, places=(replace(one.place, node=names[p, s % depths[p]].id),))
                        for s, one in enumerate(row.stages)
                    ),
                )
                for p, row in enumerate(plan.pipelines)
            ),
        )


def check_devices(plan: Plan, nodes: list[PlannerNode]) -> None:
    sizes = {one.id: one for one in nodes}
    taken = set()
    for pipeline in plan.pipelines:
        for stages in plan.chunks(pipeline):
            (place,) = {stage.place for stage in stages}
            assert place.node in sizes
            assert sizes[place.node].key == (place.gpu, place.machine, place.zone)
            assert len(place.devices) == stages[0].tp
            for device in place.devices:
                assert 0 <= device < sizes[place.node].gpus
                assert (place.node, device) not in taken
                taken.add((place.node, device))


@pytest.mark.sim
def test_no_permutation_is_cheaper_than_the_assignment(examples: int) -> None:
    """With one TP degree it is always the best of all; with several, nearly always.

    Plans have one chunk or several on each device group, before and after.
    """
    worse, tried = 0, 0
    seen = set()
    for seed in range(examples):
        rng = random.Random(f"assignment {seed}")
        tp = rng.choice([None, 1, 2, 4])
        nodes = [node(f"n{i}", rng.choice(ZONES), rng.choice([2, 4, 4])) for i in range(4)]
        room = Counter(dict.fromkeys(ZONES, 0))
        for one in nodes:
            room[one.zone] += one.gpus
        the_state = state(rng)
        before, after = (random_plan(rng, room, tp, rng.choice([1, 2, 3])) for _ in range(2))
        if before is None or after is None:
            continue
        ask = {"state": the_state, "routes": routes()}
        running = assign(before, nodes, running=None, **ask)
        if running is None:
            continue
        live = nodes[1:] if rng.random() < 0.5 else nodes
        costs = [usd_of(p, running, live, the_state) for p in every_placement(after, live)]
        wanted = keeping_places(after, running, live)
        found = assign(wanted, live, running=running, **ask)
        if found is None:
            assert not costs or tp is None
            continue
        check_devices(found, live)
        ours, best = usd_of(found, running, live, the_state), min(costs)
        tried += 1
        seen.add((running.virtual_stages > 1, found.virtual_stages > 1))
        assert ours >= best * (1 - 1e-9)
        if tp is not None:
            assert ours <= best * (1 + 1e-9) + 1e-12, seed
        worse += ours > best * (1 + 1e-9) + 1e-12
    assert tried >= examples // 3
    assert worse <= 0.1 * tried
    assert len(seen) == 4, "chunks came, stayed and went"


def test_the_flow_has_minimum_cost() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        cost = rng.integers(0, 9, (3, 3)).astype(float)
        supply, room = rng.integers(0, 3, 3), rng.integers(0, 4, 3)
        if supply.sum() > room.sum():
            continue
        flow = cheapest_flow(cost, supply, room)
        assert (flow >= 0).all()
        assert (flow.sum(axis=1) == supply).all()
        assert (flow.sum(axis=0) <= room).all()
        rows = [row for row in range(3) for _ in range(supply[row])]
        best = min(
            sum(cost[row, column] for row, column in zip(rows, columns, strict=True))
            for columns in itertools.product(range(3), repeat=len(rows))
            if (np.bincount(np.array(columns, dtype=int), minlength=3) <= room).all()
        )
        assert (cost * flow).sum() == pytest.approx(best)


def pipeline(*stages: tuple[int, int, int], zone: str = ZONES[0]) -> Pipeline:
    """Stages as (first layer, end, tp)."""
    place = Place("A100-40", "A100-40x4", zone)
    return Pipeline(1, tuple(Stage((a, b), tp, (place,)) for a, b, tp in stages))


def test_unchanged_pipelines_keep_their_devices() -> None:
    nodes = [node(f"n{i}") for i in range(4)]
    ask = {"state": state(random.Random(0)), "routes": routes()}
    row = pipeline((0, 3, 2), (3, 6, 2))
    running = assign(Plan(1, (row,) * 4), nodes, running=None, **ask)
    assert running is not None
    live = [one for one in nodes if one.id != "n1"]
    alive = [p for p in running.pipelines if all(s.place.node != "n1" for s in p.stages)]
    fewer = keeping_places(Plan(1, (row,) * 3), running, live)
    found = assign(fewer, live, running=running, **ask)
    assert found is not None
    for kept in alive:
        assert kept.stages in [p.stages for p in found.pipelines]


def test_layers_without_a_live_holder_are_reported() -> None:
    nodes = [node("a"), node("b"), node("c")]
    the_state = state(random.Random(1))
    ask = {"state": the_state, "routes": routes()}
    plan = Plan(1, (pipeline((0, 2, 4), (2, 6, 4)),))
    running = assign(plan, nodes[:2], running=None, **ask)
    assert running is not None
    lost = running.pipelines[0].stages[1].place.node
    live = [one for one in nodes if one.id != lost]
    found = assign(keeping_places(plan, running, live), live, running=running, **ask)
    assert found is not None
    moved = transfers_of(found, live, running=running, **ask)
    assert moved.lost_layers == (2, 3, 4, 5)
    # What head and embedding share is on the first node too.
    assert moved.network_bytes == the_state.bytes_by_unit[-1]
    assert moved.restored_bytes == the_state.bytes_by_unit[2:6].sum()
    assert moved.own_device_bytes == the_state.bytes_by_unit[:2].sum()


def test_bytes_come_from_the_same_zone_where_they_can() -> None:
    nodes = [node("a"), node("b", ZONES[1]), node("c")]
    the_state = state(random.Random(2))
    ask = {"state": the_state, "routes": routes()}
    both = Plan(1, (pipeline((0, 6, 4)), pipeline((0, 6, 4), zone=ZONES[1])))
    running = assign(both, nodes[:2], running=None, **ask)
    assert running is not None
    more = Plan(1, (*both.pipelines, pipeline((0, 6, 4))))
    found = assign(keeping_places(more, running, nodes), nodes, running=running, **ask)
    assert found is not None
    (only,) = transfers_of(found, nodes, running=running, **ask).between_nodes
    assert (only.source, only.target) == ("a", "c")
    assert only.size_bytes == the_state.bytes_by_unit.sum()


def test_ranks_go_to_devices_that_hold_their_atoms() -> None:
    """From TP 2 to TP 4 on one node: two of the four ranks have what they need."""
    nodes = [node("a")]
    the_state = state(random.Random(3))
    ask = {"state": the_state, "routes": routes()}
    running = assign(Plan(1, (pipeline((0, 6, 2)),)), nodes, running=None, **ask)
    assert running is not None
    assert running.pipelines[0].stages[0].place.devices == (0, 1)
    found = assign(Plan(1, (pipeline((0, 6, 4)),)), nodes, running=running, **ask)
    assert found is not None
    devices = found.pipelines[0].stages[0].place.devices
    # Device 0 holds the first half, device 1 the second; a quarter of each is of use.
    assert devices.index(0) in (0, 1)
    assert devices.index(1) in (2, 3)
    moved = transfers_of(found, nodes, running=running, **ask)
    assert moved.between_nodes == ()
    assert moved.own_device_bytes == pytest.approx(the_state.bytes_by_unit[:-1].sum() / 2)
    assert moved.same_node_bytes == pytest.approx(the_state.bytes_by_unit[:-1].sum() / 2)


def test_groups_that_do_not_fit_into_machines_are_refused() -> None:
    ask = {"state": state(random.Random(4)), "routes": routes()}
    plan = Plan(1, (pipeline((0, 6, 4)),))
    assert assign(plan, [node("a", gpus=2), node("b", gpus=2)], running=None, **ask) is None
    assert assign(plan, [node("a", ZONES[1])], running=None, **ask) is None


# Placement ---------------------------------------------------------------------------------------


def neighbours(plan: Plan) -> set[frozenset[tuple[int, int]]]:
    """The sets of device groups, as (pipeline, stage), that share a node."""
    found: dict[str, set[tuple[int, int]]] = {}
    for p, row in enumerate(plan.pipelines):
        for s, one in enumerate(row.stages):
            found.setdefault(one.place.node or "", set()).add((p, s))
    return {frozenset(some) for some in found.values()}


def laid_out(plan: Plan) -> set[frozenset[tuple[int, int]]]:
    """The same, as the estimator lays the plan out on machines of four."""
    found: dict[object, set[tuple[int, int]]] = {}
    for (p, s, _), machine in lay_out(plan, lambda *_: ((4, 1),)).node_of.items():
        found.setdefault(machine, set()).add((p, s))
    return {frozenset(some) for some in found.values()}


@pytest.mark.sim
def test_a_first_plan_gets_the_machines_that_were_estimated(examples: int) -> None:
    for seed in range(2 * examples):
        rng = random.Random(f"placement {seed}")
        wanted = random_plan(rng, dict.fromkeys(ZONES, 16))
        if wanted is None:
            continue
        more = rng.randint(1, 3)
        together = rng.choice([1, 2])
        plan = replace(wanted, pipelines=wanted.pipelines * more, together=together)
        nodes = [node(f"{zone}{i}", zone) for zone in ZONES for i in range(12)]
        found = assign(plan, nodes, running=None, state=state(rng), routes=routes())
        assert found is not None
        check_devices(found, nodes)
        assert neighbours(found) == laid_out(plan), seed


@pytest.mark.sim
def test_a_plan_that_fits_fits_in_any_placement(examples: int) -> None:
    for seed in range(20 * examples):
        rng = random.Random(f"placement fits {seed}")
        nodes = [node(f"n{i}", rng.choice(ZONES), rng.choice([2, 4, 4])) for i in range(4)]
        room = Counter(dict.fromkeys(ZONES, 0))
        for one in nodes:
            room[one.zone] += one.gpus
        before, after = random_plan(rng, dict(room)), random_plan(rng, dict(room))
        ask = {"state": state(rng), "routes": routes()}
        running = assign(before, nodes, running=None, **ask) if before is not None else None
        if running is None or after is None:
            continue
        live = nodes[1:] if rng.random() < 0.5 else nodes
        plain = assign(keeping_places(after, running, live), live, running=running, **ask)
        beside = replace(after, together=rng.choice([1, 2]))
        found = assign(keeping_places(beside, running, live), live, running=running, **ask)
        assert (found is None) == (plain is None), seed
        if found is not None:
            check_devices(found, live)


def test_new_pipelines_are_placed_beside_those_that_stay() -> None:
    """Two of four pipelines lose their nodes, and two others join; the rest does not move."""
    nodes = [node(f"n{i}") for i in range(6)]
    ask = {"state": state(random.Random(5)), "routes": routes()}
    row = pipeline((0, 2, 1), (2, 4, 1), (4, 5, 1), (5, 6, 1))
    plan = Plan(1, (row,) * 4, together=1)
    running = assign(plan, nodes[:4], running=None, **ask)
    assert running is not None
    live = nodes[2:]
    found = assign(keeping_places(plan, running, live), live, running=running, **ask)
    assert found is not None
    assert neighbours(found) == {frozenset((p, s) for s in range(4)) for p in range(4)}
    kept = {p.stages for p in running.pipelines} & {p.stages for p in found.pipelines}
    assert len(kept) == 2


def test_a_pipeline_finds_room_beside_others_where_no_node_is_free() -> None:
    """Two GPUs are free on each of two nodes: one pipeline of two stages on each."""
    nodes = [node("a"), node("b")]
    ask = {"state": state(random.Random(6)), "routes": routes()}
    large = pipeline((0, 6, 2))
    running = assign(Plan(1, (large,) * 2), [node("a", gpus=2), node("b", gpus=2)],
                     running=None, **ask)  # fmt: skip
    assert running is not None
    small = pipeline((0, 3, 1), (3, 6, 1))
    plan = Plan(1, (large, large, small, small), together=1)
    found = assign(keeping_places(plan, running, nodes), nodes, running=running, **ask)
    assert found is not None
    for one in found.pipelines[2:]:
        assert len({stage.place.node for stage in one.stages}) == 1


def test_replanning_to_the_same_plan_moves_no_bytes() -> None:
    """To the byte: sums of the ranks' shares would otherwise differ by a rounding."""
    rng = random.Random(4)
    nodes = [node(name, zone) for name, zone in zip("abcdef", ZONES * 3, strict=True)]
    for _ in range(100):
        the_state = TrainingState(np.array([rng.random() for _ in range(LAYERS)] + [0.1]) * 1e9, 4)
        ask = {"state": the_state, "routes": routes()}
        plan = random_plan(rng, dict.fromkeys(ZONES, 12))
        running = None if plan is None else assign(plan, nodes, running=None, **ask)
        if running is not None:
            moved = transfers_of(running, nodes, running=running, **ask)
            assert (moved.network_bytes, moved.restored_bytes, moved.same_node_bytes) == (0, 0, 0)


def test_a_plan_without_nodes_takes_the_first_ones_in_the_order_of_their_numbers() -> None:
    nodes = [node(f"pool/{number}") for number in range(1, 13)]
    stage = Stage((0, LAYERS), 4, (Place("A100-40", "A100-40x4", ZONES[0]),))
    plan = Plan(1, (Pipeline(1, (stage,)),) * 3)
    some = state(random.Random("first nodes"))
    placed = assign(plan, nodes[::-1], running=None, state=some, routes=routes())
    assert placed is not None
    assert nodes_used(placed) == {"pool/1", "pool/2", "pool/3"}
