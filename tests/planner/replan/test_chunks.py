"""Plans with chunks: what devices hold, what a move to or from them fetches, and their replans."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import sailord.local
from planner.api import plan_job
from planner.problem.question import Question
from planner.replan.answers_ahead import Precomputed
from planner.replan.assign_nodes import assign, keeping_places
from planner.replan.damage import RunningPlan, damage
from planner.replan.match_nodes import match_nodes
from planner.replan.move_cost import DEFAULT_TIMES, cost_of_move
from planner.replan.nodes import PlannerNode, nodes_of, nodes_used
from planner.replan.replan_search import ReplanSearch
from planner.replan.replanner import Replanner
from planner.replan.state_map import TrainingState, layers_of, placed_groups, spans_by_device
from planner.replan.transfers import Transfers, transfers_of
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import load_cluster
from simulator.inputs.job_file import load_job
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.planner.replan.test_assign_nodes import (
    LAYERS,
    NETWORK,
    ZONES,
    node,
    random_plan,
    routes,
    state,
)
from tests.planner.replan.test_replanner import change, check
from worker.layout.rank_layout import rank_places

DATA = Path(sailord.local.__file__).parent / "data"


# What devices hold --------------------------------------------------------------------------------


def held_by_ranks(plan: Plan, atoms: int) -> dict[tuple[str, int], set[tuple[int, int]]]:
    """The (layer, atom) pairs on each device, as the runtime numbers and cuts its ranks."""
    found: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for rank in rank_places(plan):
        place = plan.pipelines[rank.pipeline].stages[rank.stage].place
        share = atoms // rank.tp
        mine = range(rank.index * share, (rank.index + 1) * share)
        device = (place.node or "", place.devices[rank.index])
        assert device not in found, "each rank has a device of its own"
        found[device] = set(itertools.product(rank.layers, mine))
    return found


@pytest.mark.sim
def test_devices_hold_what_the_runtime_puts_on_them(examples: int) -> None:
    """Before and after moves between plans with one, two and three chunks."""
    tried = 0
    for seed in range(5 * examples):
        rng = random.Random(f"chunks {seed}")
        nodes = [node(f"n{i}", rng.choice(ZONES)) for i in range(6)]
        room = {zone: sum(4 for one in nodes if one.zone == zone) for zone in ZONES}
        # No tensor is shared by the first and the last layer.
        the_state = TrainingState(np.append(state(rng).bytes_by_unit[:-1], 0.0), 4)
        ask = {"state": the_state, "routes": routes()}
        plans = [random_plan(rng, room, None, rng.choice([1, 2, 3])) for _ in range(2)]
        before, after = (p and assign(p, nodes, running=None, **ask) for p in plans)
        if before is None or after is None:
            continue
        after = assign(keeping_places(after, before, nodes), nodes, running=before, **ask)
        assert after is not None
        tried += 1
        atoms = the_state.atoms((before, after))
        had, needed = held_by_ranks(before, atoms), held_by_ranks(after, atoms)
        for plan, held in ((before, had), (after, needed)):
            spans = spans_by_device(plan, atoms)
            assert spans.keys() == held.keys()
            for device, (layers, (low, high)) in spans.items():
                whole = [layer for span in layers for layer in range(*span)]
                assert held[device] == set(itertools.product(whole, range(low, high)))
        size = the_state.bytes_by_unit / atoms
        moved = transfers_of(after, nodes, running=before, **ask)
        kept = [size[layer] for d, held in needed.items() for layer, _ in held & had.get(d, set())]
        assert moved.own_device_bytes == pytest.approx(sum(kept))
        assert fetched(moved) == lacking(had, needed)
    assert tried > examples


def fetched(moved: Transfers) -> dict[str, set[int]]:
    """The layers that each node fetches."""
    found = defaultdict(set)
    for each in moved.between_nodes:
        found[each.target] |= set(each.layers)
    return dict(found)


def lacking(
    had: dict[tuple[str, int], set[tuple[int, int]]],
    needed: dict[tuple[str, int], set[tuple[int, int]]],
) -> dict[str, set[int]]:
    """The layers that each node needs and does not have."""

    def by_node(held: dict[tuple[str, int], set[tuple[int, int]]]) -> dict[str, set[int]]:
        layers = defaultdict(set)
        for (name, _), parts in held.items():
            layers[name] |= {layer for layer, _ in parts}
        return layers

    here, there = by_node(had), by_node(needed)
    found = {name: layers - here.get(name, set()) for name, layers in there.items()}
    return {name: layers for name, layers in found.items() if layers}


def on(name: str, *layers: tuple[int, int]) -> list[Stage]:
    place = Place("A100-40", "A100-40x4", ZONES[0], name, (0,))
    return [Stage(span, 1, (place,)) for span in layers]


PLAIN = Plan(1, (Pipeline(2, (*on("a", (0, 3)), *on("b", (3, 6)))),))
A, B = on("a", (0, 1), (2, 4)), on("b", (1, 2), (4, 6))
CHUNKED = Plan(1, (Pipeline(2, (A[0], B[0], A[1], B[1])),), "interleaved", 2)
PAIR = [node("a", gpus=1), node("b", gpus=1)]


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        (PLAIN, CHUNKED, {("a", "b", (1,)), ("b", "a", (3,))}),
        (CHUNKED, PLAIN, {("b", "a", (1,)), ("a", "b", (3,))}),
        (CHUNKED, CHUNKED, set()),
    ],
)
def test_a_move_to_chunks_and_back_fetches_what_is_lacking(before, after, moves) -> None:
    the_state = state(random.Random(1))
    ask = {"state": the_state, "routes": routes()}
    moved = transfers_of(after, PAIR, running=before, **ask)
    assert {(t.source, t.target, t.layers) for t in moved.between_nodes} == moves
    gone = {layer for *_, layers in moves for layer in layers}
    stays = [layer for layer in range(LAYERS) if layer not in gone]
    assert moved.own_device_bytes == the_state.bytes_by_unit[stays].sum()
    assert (moved.same_node_bytes, moved.restored_bytes) == (0, 0)


def test_a_lost_node_takes_all_chunks_of_its_group() -> None:
    the_state = state(random.Random(1))
    ask = {"state": the_state, "routes": routes()}
    live = [PAIR[1], node("c", gpus=1)]
    found = assign(keeping_places(CHUNKED, CHUNKED, live), live, running=CHUNKED, **ask)
    assert found is not None
    assert [stage.place.node for stage in found.pipelines[0].stages] == ["c", "b"] * 2
    moved = transfers_of(found, live, running=CHUNKED, **ask)
    assert moved.lost_layers == (0, 2, 3)
    # What head and embedding share is on the other node, too.
    assert moved.network_bytes == the_state.bytes_by_unit[-1]


def test_a_group_goes_to_the_node_that_holds_most_of_all_its_chunks() -> None:
    """Not of the first one alone, which is the smaller part here."""
    ask = {"state": TrainingState(np.array([1.0, 1, 1, 9, 1, 1, 0]) * 1e9, 4), "routes": routes()}
    running = Plan(1, (Pipeline(1, (*on("a", (0, 3)), *on("b", (3, 6)))),))
    bare = [
        replace(stage, places=(stage.place.without_node,)) for stage in CHUNKED.pipelines[0].stages
    ]
    cuts = [(0, 1), (1, 2), (2, 4), (4, 6)]
    stages = tuple(replace(s, layers=span) for s, span in zip(bare, cuts, strict=True))
    found = assign(replace(CHUNKED, pipelines=(Pipeline(2, stages),)), PAIR, running=running, **ask)
    assert found is not None
    assert [stage.place.node for stage in found.pipelines[0].stages] == ["b", "a"] * 2


def test_a_pipeline_with_the_same_stages_but_no_chunks_keeps_no_places() -> None:
    """The same four stages belong to two device groups with chunks, and to four without."""
    nodes = [node("a", gpus=2), node("b", gpus=2)]
    ask = {"state": state(random.Random(1)), "routes": routes()}
    plain = replace(CHUNKED, schedule="1f1b", virtual_stages=1)
    found = assign(keeping_places(plain, CHUNKED, nodes), nodes, running=CHUNKED, **ask)
    assert found is not None
    devices = [(s.place.node, *s.place.devices) for s in found.pipelines[0].stages]
    assert sorted(devices) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_chunks_count_once_in_the_cost_of_a_move() -> None:
    """A device holds all of its chunks, and meets the others of its pipeline once."""
    the_state = replace(state(random.Random(1)), bytes_by_unit=PLAIN_BYTES)
    costs = [
        cost_of_move(
            plan,
            transfers_of(plan, PAIR, running=plan, state=the_state, routes=routes()),
            PAIR,
            state=the_state,
            network=NETWORK,
            old_iteration_s=1.0,
            new_iteration_s=1.0,
            is_planned=True,
            usd_per_hour=1.0,
            times=DEFAULT_TIMES,
        )
        for plan in (PLAIN, CHUNKED)
    ]
    assert costs[0] == costs[1]


PLAIN_BYTES = state(random.Random(1)).bytes_by_unit * 0 + 1e9
"""All layers alike, so that both plans have as much on each device."""


# Which plan follows -------------------------------------------------------------------------------


@cache
def running_on(
    machines: int, samples: int | None = None
) -> tuple[Replanner, RunningPlan, tuple[PlannerNode, ...]]:
    """The exact trainer with few samples, on as many emulated nodes that it has chunks."""
    job, cluster = asked_on(machines, samples)
    answer = plan_job(Question(job, cluster, Measurements(), is_bounded=False, proves=False))
    assert answer.plan is not None
    assert answer.plan.virtual_stages == 2
    replanner = Replanner(job, cluster, Measurements())
    nodes = nodes_of(cluster)
    placed = replanner.place(answer.plan, nodes)
    assert placed is not None
    return replanner, replanner.prepare(placed, nodes), nodes


def asked_on(machines: int, samples: int | None = None) -> tuple[Job, Cluster]:
    """By default eight samples for every four nodes."""
    file = load_cluster(DATA / "cluster.toml")
    pool = replace(file.pools[0], gpus=machines)
    job = load_job(DATA / "exact.toml")
    objective = replace(job.objective, allow=("interleaved",))
    return (
        replace(job, global_batch=samples or 8 * (machines // 4), objective=objective),
        replace(file, pools=(pool,)),
    )


def test_a_lost_node_is_replaced_by_a_spare_one_with_chunks_as_before() -> None:
    replanner, running, nodes = running_on(5)
    gone = min(nodes_used(running.plan))
    live = tuple(one for one in nodes if one.id != gone)
    found = replanner.replan(running, live)
    check(found, replanner, live)
    assert found.plan is not None
    assert found.plan.virtual_stages == 2
    assert found.transfers is not None
    # The others stay, and only what head and embedding share is on one of them.
    assert found.transfers.network_bytes == replanner.state.bytes_by_unit[-1]
    ahead = Precomputed(replanner, running, nodes).all()
    again = ahead.after(live)
    check(again, replanner, live)
    assert again.plan is not None
    assert again.plan.virtual_stages == 2


def test_pipelines_that_survive_keep_their_chunks_in_rounds() -> None:
    replanner, running, nodes = running_on(8)
    assert [pipeline.micro_batches for pipeline in running.plan.pipelines] == [8, 8]
    kept = {place.node for _, place in [*placed_groups(running.plan)][:4]}
    live = tuple(one for one in nodes if one.id in kept)
    left = damage(running, live)
    assert (left.alive, [one.lost_stages for one in left.broken]) == ((0,), [(0, 1, 2, 3)])
    found = replanner.replan(running, live)
    check(found, replanner, live)
    assert found.plan is not None
    (pipeline,) = found.plan.pipelines
    assert (found.plan.virtual_stages, pipeline.micro_batches) == (2, 16)
    assert pipeline.stages == running.plan.pipelines[0].stages
    assert found.transfers is not None
    assert found.transfers.network_bytes == 0


def test_survivors_share_micro_batches_in_rounds() -> None:
    """Ten each would be no multiple of the four device groups."""
    job, cluster = asked_on(12)
    (stages, _), nodes = (p.stages for p in running_on(8)[1].plan.pipelines), nodes_of(cluster)
    bare = tuple(replace(s, places=(s.place.without_node,)) for s in stages)
    for counts in ((8, 8, 4), (8, 4, 8)):
        replanner = Replanner(replace(job, global_batch=20), cluster, Measurements())
        pipelines = tuple(Pipeline(count, bare) for count in counts)
        plan = replanner.place(Plan(1, pipelines, "interleaved", 2), nodes)
        assert plan is not None
        running = replanner.prepare(plan, nodes)
        lost = {place.node for _, place in [*placed_groups(plan)][8:]}
        live = tuple(one for one in nodes if one.id not in lost)
        search = ReplanSearch(replanner, running, live, 1)
        found = search.survivors()
        assert found is not None
        assert {each.micro_batches for each in found.plan.pipelines} == {12, 8}
        assert found.plan.virtual_stages == 2


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_any_loss_leads_to_a_plan_that_can_run(lost: int) -> None:
    """With chunks or without: all layers are found where they are."""
    replanner, running, nodes = running_on(8)
    for gone in itertools.islice(itertools.combinations(nodes, lost), 0, None, 5):
        live = tuple(one for one in nodes if one not in gone)
        found = replanner.replan(running, live)
        check(found, replanner, live)
        plan, _, transfers, _ = found.found
        held = {
            layer
            for stages, place in placed_groups(running.plan)
            if place.node in {one.id for one in live}
            for span in layers_of(stages)
            for layer in range(*span)
        }
        layers = range(len(replanner.job.model.layers))
        assert set(transfers.lost_layers) == set(layers) - held
        assert plan.virtual_stages in (1, 2)


@pytest.mark.slow
@pytest.mark.sim
def test_any_sequence_of_changes_is_survived_with_chunks_and_without(examples: int) -> None:
    """Answers in a hurry and longer searches, in turn."""
    moves = set()
    for number in range(max(2, examples // 6)):
        replanner, running, nodes = running_on(7, 12)
        rng, away = random.Random(f"changes of chunks {number}"), list[PlannerNode]()
        for turn in range(12):
            nodes = change(rng, nodes, away, turn)
            answer = replanner.replan if turn % 3 else replanner.improve
            found = answer(running, nodes)
            if found.plan is None:
                assert len(nodes) < 3, "three nodes hold the model"
                continue
            check(found, replanner, nodes)
            moves.add((running.plan.virtual_stages > 1, found.plan.virtual_stages > 1))
            running = replanner.prepare(found.plan, nodes)
    assert {(True, False), (False, True)} <= moves, "chunks went and came"


def test_nodes_that_join_give_a_plain_plan_chunks() -> None:
    replanner, running, nodes = running_on(4)
    plain = replanner.replan(running, nodes[:3])
    assert plain.plan is not None
    assert plain.plan.virtual_stages == 1, "three groups have too few layers for rounds of eight"
    found = replanner.improve(replanner.prepare(plain.plan, nodes[:3]), nodes)
    check(found, replanner, nodes)
    assert found.plan is not None
    assert found.plan.virtual_stages == 2


def test_an_unplaced_plan_ran_on_a_machine_for_each_group() -> None:
    _, cluster = asked_on(4)
    _, running, _ = running_on(4)
    bare = replace(
        running.plan,
        pipelines=tuple(
            replace(p, stages=tuple(replace(s, places=(s.place.without_node,)) for s in p.stages))
            for p in running.plan.pipelines
        ),
    )
    none_up = replace(cluster, pools=(replace(cluster.pools[0], gpus=0),))
    assert len(match_nodes(bare, none_up).before) == 4
