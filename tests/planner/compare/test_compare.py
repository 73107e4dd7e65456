"""Comparing planners on one case: which plans are judged, rejected and reported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from planner.compare.interface import Case, Mode, ProposedPlan
from planner.compare.judge_all import JudgedPlanner, judge_entry
from planner.compare.registry import BASELINES, baseline, names
from sailord.cli.main import main
from simulator.api import Measurements, estimator, network_of
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Pipeline, Place, Plan, Stage

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PLACE = Place("V100-16", "V100-16x4", "us-central1-a")


def one_pool() -> Case:
    job = Job("small", preset("opt-125m"), 8, 512, precision="fp32", optimizer="adam")
    pool = Pool(PLACE.zone, PLACE.gpu, PLACE.machine, 4, 4, price_usd_per_gpu_hour=1.0)
    cluster = Cluster((pool,), load_catalogue())
    network = network_of(cluster, Measurements().network)
    costs = LayerCosts(job, profile=None, catalogue=cluster.catalogue, network=network)
    return Case(job, cluster, costs, network, PlaceFacts(cluster, Measurements().network))


def whole(micro_batch: int, micro_batches: int) -> Plan:
    return Plan(micro_batch, (Pipeline(micro_batches, (Stage((0, 14), 1, (PLACE,)),)),))


class Scripted:
    """A planner that returns given proposals."""

    name = "scripted"

    def __init__(self, *proposals: ProposedPlan) -> None:
        self.given = proposals

    def proposals(self, case: Case, mode: Mode) -> Sequence[ProposedPlan]:
        assert case.job.name == "small"
        assert mode in ("fixed", "published")
        return self.given


def judged(case: Case, *proposals: ProposedPlan) -> JudgedPlanner:
    judge = estimator("event", job=case.job, cluster=case.cluster, measurements=Measurements())
    return judge_entry(Scripted(*proposals), case, "fixed", judge)


def test_the_first_plan_that_can_run_is_judged() -> None:
    """An inexpressible plan, one of a wrong batch, one too large; then two that can run."""
    case = one_pool()
    huge = replace(case.job, global_batch=512)
    case = replace(case, job=huge, costs=LayerCosts(
        huge, profile=None, catalogue=case.cluster.catalogue, network=case.network
    ))  # fmt: skip
    entry = judged(
        case,
        ProposedPlan(1.0, None, "no words for it"),
        ProposedPlan(2.0, whole(4, 1)),
        ProposedPlan(3.0, whole(512, 1)),
        ProposedPlan(4.0, whole(4, 128)),
        ProposedPlan(5.0, whole(2, 256)),
    )
    counts = {k: n for k, n in entry.passed_over.items() if n}
    assert counts == {"inexpressible": 1, "not_allowed": 1, "out_of_memory": 1}
    assert entry.plan == whole(4, 128)
    assert entry.estimate is not None
    assert entry.own_error == pytest.approx(4.0 / entry.estimate.iteration_s - 1)


def test_a_planner_without_an_estimate_of_its_own_has_no_error() -> None:
    entry = judged(one_pool(), ProposedPlan(float("nan"), whole(4, 2)))
    assert entry.plan is not None
    assert entry.own_error is None


def test_a_planner_that_finds_nothing_says_why() -> None:
    assert judged(one_pool()).why_not == "it proposed no plan"
    assert judged(one_pool(), ProposedPlan(1.0, None, "uneven")).why_not == "uneven"


def with_objective(case: Case, **wanted: Any) -> Case:
    return replace(case, job=replace(case.job, objective=Objective(**wanted)))


def test_plans_that_break_a_limit_are_passed_over() -> None:
    free = judged(one_pool(), ProposedPlan(1.0, whole(4, 2)))
    assert free.estimate is not None
    slow = judged(one_pool(), ProposedPlan(1.0, whole(1, 8)))
    assert slow.estimate is not None
    assert slow.estimate.iteration_s > free.estimate.iteration_s
    least = 1.001 / slow.estimate.iteration_s
    case = with_objective(one_pool(), min_iterations_per_s=least)
    entry = judged(case, ProposedPlan(1.0, whole(1, 8)), ProposedPlan(2.0, whole(4, 2)))
    assert entry.plan == whole(4, 2)
    assert entry.passed_over["beyond_limits"] == 1
    none = judged(case, ProposedPlan(1.0, whole(1, 8)), ProposedPlan(2.0, None, "no words"))
    assert none.plan is None
    assert "min_iterations_per_s" in none.why_not, "what came closest is told, not what came last"


def test_proposals_rank_by_dollars_when_cost_is_the_goal() -> None:
    """By their own dollars, or by what their own seconds would cost on their GPUs."""
    two = Plan(4, (Pipeline(1, whole(4, 1).pipelines[0].stages),) * 2)
    case = with_objective(one_pool(), goal="cost")
    assert judged(case, ProposedPlan(1.0, two), ProposedPlan(1.9, whole(4, 2))).plan == whole(4, 2)
    assert judged(case, ProposedPlan(1.0, two), ProposedPlan(2.1, whole(4, 2))).plan == two
    said = judged(case, ProposedPlan(1.0, two, usd=5.0), ProposedPlan(9.0, whole(4, 2), usd=4.0))
    assert said.plan == whole(4, 2)


def test_plans_without_a_price_have_no_cost() -> None:
    case = with_objective(one_pool(), goal="cost")
    unpriced = replace(case.cluster.pools[0], price_usd_per_gpu_hour=None)
    cluster = Cluster((unpriced,), case.cluster.catalogue)
    case = replace(case, cluster=cluster, facts=PlaceFacts(cluster, Measurements().network))
    with pytest.raises(InputError, match="no price is known"):
        judged(case, ProposedPlan(1.0, whole(4, 2)))


def test_every_registered_name_loads_its_planner() -> None:
    assert [baseline(name).name for name in BASELINES] == list(BASELINES)
    assert names()[0] == "sailor"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    job, cluster = tmp_path / "job.toml", tmp_path / "cluster.toml"
    job.write_text(
        '[model]\npreset = "opt-125m"\n'
        '[training]\nglobal_batch = 16\nsequence = 512\nprecision = "fp32"\nmax_tp = 2\n'
    )
    cluster.write_text(
        '[[pool]]\nzone = "us-central1-a"\ngpu = "V100-16"\ngpus_per_machine = 4\ngpus = 4\n'
    )
    return [str(job), str(cluster)]


@pytest.mark.slow
def test_our_plan_is_at_least_as_good_as_every_baseline(small: list[str]) -> None:
    result = run(*small, "--json")
    assert result.exit_code == 0, result.output
    found = {row["planner"]: row for row in json.loads(result.stdout)}
    assert set(found) == set(names())
    seconds = {name: row["iteration_s"] for name, row in found.items() if row["found"]}
    assert len(seconds) >= 8
    assert seconds["sailor"] <= min(seconds.values()) * (1 + 1e-9)


def test_the_table_ranks_by_the_common_simulator(small: list[str]) -> None:
    result = run(*small, "--planners", "megatron,sailor,whale")
    lines = result.stdout.splitlines()
    seconds = [float(line.split()[1]) for line in lines[2:5]]
    assert seconds == sorted(seconds)


def test_a_planner_that_uses_all_gpus_is_asked_about_fewer(small: list[str]) -> None:
    """Whale deals layers and batch to all GPUs; a far T4 makes that slow."""
    with Path(small[1]).open("a", encoding="utf-8") as file:
        file.write(
            '[[pool]]\nzone = "europe-west4-a"\ngpu = "T4"\ngpus_per_machine = 4\ngpus = 4\n'
        )
    rows = {}
    for more in ([], ["--whole"]):
        result = run(*small, "--planners", "whale", "--json", *more)
        assert result.exit_code == 0, result.output
        (rows[bool(more)],) = json.loads(result.stdout)
    part, whole_cluster = rows[False], rows[True]
    assert part["gpus_used"] == {"V100-16@us-central1-a": 4}
    assert (part["given_gpus"], whole_cluster["given_gpus"]) == (4, 8)
    assert part["iteration_s"] < whole_cluster["iteration_s"]
    assert (part["tried"], whole_cluster["tried"]) == (3, 1)
    assert part["tried_s"] > part["search_s"] > 0
    assert part["peak_bytes"] > 0


def test_all_planners_pay_spot_first_where_no_other_plan_keeps_a_limit(small: list[str]) -> None:
    with Path(small[0]).open("a", encoding="utf-8") as file:
        file.write("[objective]\nmax_usd_per_hour = 4.5\n")
    pool = Path(small[1]).read_text(encoding="utf-8") + "price_usd_per_gpu_hour = "
    Path(small[1]).write_text(f"{pool}5.0\n{pool}1.0\nspot = true\n", encoding="utf-8")
    result = run(*small, "--planners", "sailor,megatron", "--json")
    for row in json.loads(result.stdout):
        assert row["found"], row
        assert row["cost_usd_per_iteration"] / row["iteration_s"] * 3600 <= 4.5


def test_answers_that_cannot_be_told_apart_are_named(small: list[str]) -> None:
    """The same plan of two planners."""
    result = run(*small, "--planners", "sailor,megatron,whale")
    tied = [line for line in result.stdout.splitlines() if "cannot be told apart" in line]
    rows = [line.split() for line in result.stdout.splitlines()[2:5]]
    near = [row[0] for row in rows[1:] if float(row[1]) <= 1.02 * float(rows[0][1])]
    assert {line.split()[-1] for line in tied} >= set(near)
    assert near


def test_an_unknown_planner_suggests_the_nearest_name(small: list[str]) -> None:
    result = run(*small, "--planners", "megatorn")
    assert result.exit_code == 2
    assert '"megatron"' in result.stderr


@pytest.mark.slow
def test_the_example_files_can_be_compared() -> None:
    files = [str(EXAMPLES / name) for name in ("opt-350m.toml", "three-zones.toml")]
    result = run(*files, "--planners", "varuna,megatron", "--json")
    assert result.exit_code == 0, result.output
    assert all(row["found"] for row in json.loads(result.stdout))
