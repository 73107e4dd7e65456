"""Replanning: after any loss or addition the next plan can run, and is as good as it should be."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from planner.api import plan_job
from planner.problem.question import Question
from planner.replan.answers_ahead import Precomputed
from planner.replan.assign_nodes import stage_is_alive
from planner.replan.damage import RunningPlan
from planner.replan.nodes import PlannerNode, cluster_with, is_placed, nodes_of, nodes_used
from planner.replan.replan_search import ReplanSearch
from planner.replan.replanner import REPLAN_BUDGET, Replan, Replanner
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.hardware.runtime_constants import PLATFORMS
from simulator.inputs.job_file import load_job
from simulator.inputs.plan_check import check_plan, split_in_proportion
from simulator.inputs.plan_file import plan_text
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Pipeline, Place, Plan, Schedule, Stage
from tests.planner.small_cases import SmallCase, random_case
from tests.planner.tight_memory import demo

ROOT = Path(__file__).resolve().parents[3]
GPUS_MIN = 12


def started(case: SmallCase) -> tuple[Replanner, RunningPlan, tuple[PlannerNode, ...]] | None:
    """A job that runs on all nodes of its cluster; ``None`` if it has no plan."""
    answer = plan_job(Question(case.job, case.cluster, case.measurements, budget=20))
    if answer.plan is None:
        return None
    replanner = Replanner(case.job, case.cluster, case.measurements)
    nodes = nodes_of(case.cluster)
    placed = replanner.place(answer.plan, nodes)
    assert placed is not None
    return replanner, replanner.prepare(placed, nodes), nodes


def case_of(seed: str, **options: object) -> SmallCase:
    """A case that is quick to plan: too many GPUs for an exhaustive search, catalogue links."""
    rng = random.Random(seed)
    sizes: dict[str, object] = {"gpus_max": 28, "layers_max": 5, "batch": rng.choice([16, 28, 32])}
    while True:
        case = random_case(rng, **{**sizes, **options})  # type: ignore[arg-type]  # by name
        if sum(pool.gpus for pool in case.cluster.pools) >= GPUS_MIN:
            network = replace(case.measurements.network, raw_between={})
            known = replace(case.measurements, network=network)
            return SmallCase(case.job, case.cluster, known)


def check(found: Replan, replanner: Replanner, nodes: tuple[PlannerNode, ...]) -> None:
    """Invariants of every answer with a plan."""
    plan, estimate, transfers, move = found.found
    cluster = cluster_with(replanner.cluster, nodes)
    assert is_placed(plan)
    assert nodes_used(plan) <= {node.id for node in nodes}
    by_id = {node.id: node for node in nodes}
    assert all(stage_is_alive(stage, by_id) for p in plan.pipelines for stage in p.stages)
    assert check_plan(plan, replanner.job, cluster) == ()
    assert plan.samples_per_iteration == replanner.job.global_batch
    assert estimate.fits
    assert estimate.iteration_s == replanner.judge.estimate(plan).iteration_s
    assert {t.source for t in transfers.between_nodes} <= by_id.keys()
    assert move.seconds > 0


def dropped(running: RunningPlan, nodes: tuple[PlannerNode, ...]) -> Plan | None:
    """The running plan without its broken pipelines, computed independently."""
    by_id = {node.id: node for node in nodes}
    kept = [
        p for p in running.plan.pipelines if all(stage_is_alive(stage, by_id) for stage in p.stages)
    ]
    total = sum(p.micro_batches for p in running.plan.pipelines)
    if not kept or len(kept) > total:
        return None
    counts = split_in_proportion(total, [p.micro_batches for p in kept])
    return replace(
        running.plan,
        pipelines=tuple(Pipeline(n, p.stages) for n, p in zip(counts, kept, strict=True)),
    )


def change(
    rng: random.Random, nodes: tuple[PlannerNode, ...], away: list[PlannerNode], number: int
) -> tuple[PlannerNode, ...]:
    """Lose a node, several, a zone, or return some under new names; ``away`` is kept up to date."""
    kind = rng.choice(["one", "one", "several", "zone", "back", "back", "all back"])
    if (kind in ("back", "all back") and away) or len(nodes) == 1:
        count = len(away) if kind == "all back" else 1
        back = tuple(replace(away.pop(), id=f"again-{number}-{i}") for i in range(count))
        return (*nodes, *back)
    lost = set(rng.sample(nodes, 1 if kind != "several" else rng.randint(1, len(nodes) - 1)))
    if kind == "zone":
        zone = rng.choice(sorted({node.zone for node in nodes}))
        lost = {node for node in nodes if node.zone == zone}
        if len(lost) == len(nodes):
            lost.remove(min(lost))
    away += sorted(lost)
    return tuple(node for node in nodes if node not in lost)


@pytest.mark.slow
@pytest.mark.sim
def test_any_sequence_of_losses_and_additions_is_survived(examples: int) -> None:
    answered = 0
    for number in range(max(2, examples // 12)):
        case = case_of(f"sequence {number}")
        begun = started(case)
        if begun is None:
            continue
        replanner, running, nodes = begun
        rng, away = random.Random(f"changes {number}"), list[PlannerNode]()
        for turn in range(20):
            nodes = change(rng, nodes, away, turn)
            found = replanner.replan(running, nodes)
            if found.plan is None:
                assert found.problems
                assert all(problem.cure for problem in found.problems)
                continue
            answered += 1
            check(found, replanner, nodes)
            simple = dropped(running, nodes)
            if simple is not None and replanner.judge.estimate(simple).fits:
                assert found.estimate is not None
                least = replanner.judge.estimate(simple).iteration_s
                assert found.estimate.iteration_s <= least
            running = replanner.prepare(found.found[0], nodes)
    assert answered >= 10 * max(2, examples // 12)


def test_without_a_change_nothing_moves() -> None:
    begun = started(case_of("sequence 1"))
    assert begun is not None
    replanner, running, nodes = begun
    found = replanner.replan(running, nodes, budget=1)
    assert found.plan == running.plan
    assert found.needed is None
    assert found.transfers is not None
    assert found.transfers.network_bytes == 0
    assert found.transfers.restored == ()


@pytest.mark.slow
def test_more_nodes_never_make_it_worse() -> None:
    for number in range(2):
        case = case_of(f"sequence {number}")
        begun = started(case)
        if begun is None:
            continue
        replanner, running, nodes = begun
        fewer = nodes[: -(len(nodes) // 3) or None]
        small = replanner.improve(running, fewer, budget=10)
        if small.plan is None:
            continue
        grown = replanner.prepare(small.plan, nodes)
        for step in (replanner.replan, replanner.improve):
            large = step(grown, nodes)
            assert large.estimate is not None
            assert small.estimate is not None
            assert large.estimate.iteration_s <= small.estimate.iteration_s
            check(large, replanner, nodes)


@pytest.mark.slow
def test_replans_with_goal_cost_are_no_dearer_than_the_surviving_pipelines() -> None:
    for number in range(2):
        case = case_of(f"sequence {number}")
        job = replace(case.job, objective=Objective(goal="cost"))
        begun = started(SmallCase(job, case.cluster, case.measurements))
        if begun is None:
            continue
        replanner, running, nodes = begun
        live = tuple(node for node in nodes if node.id != min(nodes_used(running.plan)))
        if not live:
            continue
        found = replanner.replan(running, live)
        simple = dropped(running, live)
        if found.estimate is not None and simple is not None:
            assert (found.estimate.money.total_usd or 0) <= (
                replanner.judge.estimate(simple).money.total_usd or 0
            )


@pytest.mark.slow
def test_a_risen_price_leads_to_a_cheaper_plan() -> None:
    """The running plan, judged anew at new prices, is left where a cheaper one is there."""
    case = case_of("prices", gpus_max=12, kinds_max=2)
    job = replace(case.job, objective=Objective(goal="cost"))
    begun = started(SmallCase(job, case.cluster, case.measurements))
    assert begun is not None
    _, running, nodes = begun
    used = set(running.plan.gpus_used())
    pools = tuple(
        replace(pool, price_usd_per_gpu_hour=1e3 if f"{pool.gpu}@{pool.zone}" in used else 1e-3)
        for pool in case.cluster.pools
    )
    assert len({p.price_usd_per_gpu_hour for p in pools}) == 2, "every pool is in use"
    dearer = Replanner(job, Cluster(pools, case.cluster.catalogue), case.measurements)
    again = dearer.prepare(running.plan, nodes)
    found = dearer.improve(again, nodes)
    assert found.estimate is not None
    assert (found.estimate.money.total_usd or 0) < (again.estimate.money.total_usd or 0)


@pytest.mark.slow
def test_a_cluster_that_is_too_small_says_what_would_help() -> None:
    case = case_of("sequence 1")
    begun = started(case)
    assert begun is not None
    replanner, running, nodes = begun
    found = replanner.replan(running, ())
    assert found.plan is None
    assert "no node" in str(found.problems[0])
    job = replace(case.job, objective=Objective(max_usd_per_iteration=1e-12))
    strict = Replanner(job, case.cluster, case.measurements)
    found = strict.replan(strict.prepare(running.plan, nodes), nodes)
    assert found.plan is None
    assert any("max_usd_per_iteration" in str(problem) for problem in found.problems)
    assert found.needed is not None
    assert "breaks a limit" in found.needed


@pytest.mark.slow
def test_a_running_plan_that_exceeds_memory_is_left() -> None:
    """A running plan is no candidate where its devices are too small for it."""
    catalogue = load_catalogue()
    pool = Pool("us-central1-a", "V100-16", "V100-16x4", 4, 16)
    job = Job(
        "large", preset("gpt-neo-2.7b"), global_batch=16, sequence=2048, precision="fp32", max_tp=4
    )
    replanner = Replanner(job, Cluster((pool,), catalogue), Measurements())
    nodes = nodes_of(replanner.cluster)
    place = replace(nodes[0].place, node=nodes[0].id, devices=(0, 1, 2, 3))
    stages = (Stage((0, len(job.model.layers)), 4, (place,)),)
    running = replanner.prepare(Plan(1, (Pipeline(16, stages),)), nodes)
    assert not running.estimate.fits
    found = replanner.replan(running, nodes)
    check(found, replanner, nodes)
    assert found.needed is not None
    assert "exceeds its devices' memory" in found.needed


def test_unsupported_plans_are_refused() -> None:
    begun = started(case_of("sequence 1"))
    assert begun is not None
    replanner, running, _ = begun
    for schedule in get_args(Schedule):
        if schedule not in ("1f1b", "interleaved"):
            with pytest.raises(InputError, match=schedule):
                replanner.prepare(replace(running.plan, schedule=schedule), ())
    with pytest.raises(InputError, match="takes outer steps"):
        replanner.prepare(replace(running.plan, outer_every=50), ())
    other = replace(running.plan, zero=0 if replanner.job.zero else 1)
    with pytest.raises(InputError, match=r"training\.zero"):
        replanner.prepare(other, ())


# -- precomputed --------------------------------------------------------------------------------


@pytest.mark.slow
def test_precomputed_answers_are_as_good_as_new_ones() -> None:
    for number in (1, 3):
        begun = started(case_of(f"sequence {number}"))
        if begun is None:
            continue
        replanner, running, nodes = begun
        ready = Precomputed(replanner, running, nodes).all()
        assert set(ready.by_loss) >= {frozenset([name]) for name in nodes_used(running.plan)}
        for lost, known in ready.by_loss.items():
            live = ready.without(lost)
            assert ready.after(live) is known
            now = replanner.replan(running, live)
            assert (now.plan is None) == (known.plan is None)
            if known.plan is not None and now.estimate is not None:
                check(known, replanner, live)
                assert known.estimate is not None
                assert known.estimate.iteration_s <= now.estimate.iteration_s * (1 + 1e-9)


def test_nodes_that_leave_after_a_stop_send_their_state_and_no_step_is_lost() -> None:
    """No other node has their layers."""
    begun = started(case_of("sequence 3"))
    assert begun is not None
    replanner, running, nodes = begun
    used = nodes_used(running.plan)
    gone = tuple(node for node in nodes if node.id in used)
    live = tuple(node for node in nodes if node.id not in used)
    if not live:
        gone, live = gone[1:], gone[:1]
    lost = replanner.replan(running, live)
    left = replanner.replan(running, live, leaving=gone)
    assert lost.plan is not None
    assert left.plan == lost.plan
    assert lost.transfers is not None
    assert left.transfers is not None
    assert lost.transfers.restored, "from a checkpoint"
    assert not left.transfers.restored
    assert {each.source for each in left.transfers.between_nodes} & {node.id for node in gone}
    _, _, _, after_loss = lost.found
    _, _, _, after_stop = left.found
    assert after_loss.steps_lost > after_stop.steps_lost == 0


def test_further_losses_invalidate_a_precomputed_answer() -> None:
    begun = started(case_of("sequence 3"))
    assert begun is not None
    replanner, running, nodes = begun
    ready = Precomputed(replanner, running, nodes).all()
    for lost, known in list(ready.by_loss.items()):
        for other in sorted(known.nodes - lost):
            live = ready.without(lost | {other})
            if not live:
                continue
            found = ready.after(live)
            if found.plan is not None:
                check(found, replanner, live)


def test_unused_and_new_nodes_do_not_invalidate_a_precomputed_answer() -> None:
    begun = started(case_of("sequence 3"))
    assert begun is not None
    replanner, running, nodes = begun
    ready = Precomputed(replanner, running, nodes).all()
    lost = min(ready.used)
    live = ready.without(frozenset([lost]))
    more = (*live, replace(nodes[0], id="newcomer"))
    assert ready.after(more) is ready.by_loss[frozenset([lost])]


def test_nodes_that_joined_may_allow_a_plan_where_there_was_none() -> None:
    node, spare, newcomer = (PlannerNode(name, "T4", "T4x1", "zone", 1) for name in "abc")
    stage = Stage((0, 3), 1, (replace(node.place, node="a", devices=(0,)),))
    running = SimpleNamespace(plan=Plan(1, (Pipeline(1, (stage,)),)))
    none, new = (Replan(None, None, None, None, "the plan's node is lost", n) for n in (1, 2))
    replanner = SimpleNamespace(replan=lambda *_: new)
    ready = Precomputed(cast("Any", replanner), cast("Any", running), (node, spare))
    ready.by_loss[frozenset("a")] = none
    assert ready.after((spare,)) is none
    assert ready.after((spare, newcomer)) is new


@pytest.mark.slow
def test_answers_do_not_depend_on_the_hash_seed() -> None:
    script = "from tests.planner.replan.test_replanner import digest\nprint(digest())\n"
    outputs = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1


def digest() -> str:
    """Answers to a few questions as text."""
    said = []
    begun = started(case_of("sequence 3"))
    assert begun is not None
    replanner, running, nodes = begun
    for node in nodes:
        found = replanner.replan(running, tuple(n for n in nodes if n != node))
        said.append(plan_text(found.plan) if found.plan is not None else str(found.problems))
        if found.transfers is not None:
            said.append(json.dumps([str(t) for t in found.transfers.between_nodes]))
    return "\n".join(said)


def test_a_loss_that_breaks_every_pipeline_is_answered_without_a_long_search() -> None:
    """One pipeline over several nodes: nothing survives it, and yet no long search is made."""
    case = case_of("one pipeline")
    first = case.cluster.pools[0]
    pool = replace(first, gpus=16, gpus_per_machine=2, machine=f"{first.gpu}x2")
    cluster = Cluster((pool,), case.cluster.catalogue)
    replanner = Replanner(case.job, cluster, case.measurements)
    nodes = nodes_of(cluster)
    stages = tuple(
        Stage((layer, layer + 1), 1, (nodes[0].place,))
        for layer in range(len(case.job.model.layers))
    )
    placed = replanner.place(Plan(1, (Pipeline(case.job.global_batch, stages),)), nodes)
    assert placed is not None
    running = replanner.prepare(placed, nodes)
    lost = min(nodes_used(placed))
    live = tuple(node for node in nodes if node.id != lost)
    found = replanner.replan(running, live)
    check(found, replanner, live)
    assert found.needed == "1 of 1 pipelines lost devices"
    assert 1 <= found.evaluations <= REPLAN_BUDGET


def four_by_four(together: int | None, *, machines: int) -> tuple[Replanner, RunningPlan]:
    """The README's job as four pipelines of four stages, on the first four of some machines."""
    pool = Pool("us-central1-a", "A100-40", "a2-highgpu-4g", 4, 4 * machines)
    job = load_job(ROOT / "examples/opt-350m.toml")
    replanner = Replanner(job, Cluster((pool,), load_catalogue()), Measurements())
    place = Place(pool.gpu, pool.machine, pool.zone)
    cuts = (0, 7, 14, 21, 26)
    stages = tuple(Stage(pair, 1, (place,)) for pair in itertools.pairwise(cuts))
    plan = Plan(8, (Pipeline(32, stages),) * 4, together=together)
    placed = replanner.place(plan, nodes_of(replanner.cluster)[:4])
    assert placed is not None
    return replanner, replanner.prepare(placed, nodes_of(replanner.cluster))


def nodes_by_pipeline(plan: Plan) -> list[int]:
    return [len({stage.place.node for stage in p.stages}) for p in plan.pipelines]


def test_pipelines_made_anew_are_placed_like_those_that_run() -> None:
    """Two pipelines lose their nodes, and take two spare ones."""
    replanner, running = four_by_four(1, machines=8)
    assert nodes_by_pipeline(running.plan) == [1] * 4
    assert running.together == 1
    found = replanner.replan(running, nodes_of(replanner.cluster)[2:6])
    assert found.plan is not None
    assert nodes_by_pipeline(found.plan) == [1] * 4
    assert found.found[1].iteration_s == pytest.approx(running.estimate.iteration_s)


@pytest.mark.slow
def test_a_better_placement_of_the_running_pipelines_is_found() -> None:
    replanner, running = four_by_four(None, machines=4)
    assert nodes_by_pipeline(running.plan) == [4] * 4
    assert running.together is None
    found = replanner.improve(running, nodes_of(replanner.cluster))
    _, estimate, transfers, _ = found.found
    assert estimate.iteration_s < 0.8 * running.estimate.iteration_s
    assert transfers.network_bytes > 0


def test_a_repaired_single_pipeline_needs_no_room_for_sums(tmp_path, monkeypatch) -> None:
    """Its layers are balanced anew over a large node that takes the place of a small one."""
    for gpu in ("emulated-large", "emulated-small"):
        monkeypatch.setitem(PLATFORMS, gpu, replace(PLATFORMS[gpu], transport="nccl"))
    asked = demo(1.42, 2, 1, 2, folder=tmp_path)
    answer = plan_job(asked)
    assert answer.plan is not None
    assert len(answer.plan.pipelines) == 1
    pools = tuple(replace(pool, gpus=pool.gpus + 1) for pool in asked.cluster.pools)
    cluster = replace(asked.cluster, pools=pools)
    replanner, nodes = Replanner(asked.job, cluster, asked.measurements), nodes_of(cluster)
    placed = replanner.place(answer.plan, nodes)
    assert placed is not None
    running = replanner.prepare(placed, nodes)
    lost = max(nodes_used(placed))
    assert "small" in lost
    live = tuple(node for node in nodes if node.id != lost)
    found = ReplanSearch(replanner, running, live, REPLAN_BUDGET).first()
    assert found is not None
    assert found.estimate.iteration_s < running.estimate.iteration_s
