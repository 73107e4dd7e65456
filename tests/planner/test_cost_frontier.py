"""The cost frontier: its points, and that both ends answer both goals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from planner.api import plan_job
from planner.cost_frontier import Frontier, FrontierPlan, frontier, pareto_front, thinned
from planner.problem.question import Question
from sailord.cli.main import main
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.documents.problems import InputError
from simulator.estimate.result import Estimate, Money
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan
from simulator.models.presets import preset
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from simulator.spec.provenance import MEASURED
from tests.sailord.cli.planning.command_files import CLUSTER_TEXT, JOB_TEXT, run_on

NEAR, FAR = "us-central1-a", "us-west1-a"
JOB = Job("small", preset("opt-125m"), 128, 512, precision="fp32", optimizer="adam",
          micro_batches=(4, 8))  # fmt: skip
CLUSTER = Cluster(
    (
        Pool(NEAR, "A100-40", "A100-40x4", 4, 16, price_usd_per_gpu_hour=4.0),
        Pool(FAR, "V100-16", "V100-16x2", 2, 8, price_usd_per_gpu_hour=1.0),
    ),
    load_catalogue(),
)
QUESTION = Question(JOB, CLUSTER, Measurements(), budget=30)


@pytest.fixture(scope="module")
def front() -> Frontier:
    return frontier(QUESTION, points=6)


def asking(**limits: object) -> Question:
    objective = replace(JOB.objective, **limits)  # type: ignore[arg-type]  # names of limits
    return replace(QUESTION, job=replace(JOB, objective=objective))


def test_more_throughput_always_costs_more(front: Frontier) -> None:
    assert 3 <= len(front.points) <= 6
    for one, other in pairwise(front.points):
        assert one.seconds < other.seconds
        assert one.usd > other.usd
        assert one.usd_per_hour > other.usd_per_hour


@pytest.mark.slow
def test_both_ends_are_the_best_plans_for_both_goals(front: Frontier) -> None:
    fastest, cheapest = plan_job(QUESTION), plan_job(asking(goal="cost"))
    assert fastest.objective is not None
    assert cheapest.objective is not None
    assert front.points[0].seconds <= fastest.objective
    assert front.points[-1].usd <= cheapest.objective


def test_every_plan_is_valid_and_reproduces_its_figures(front: Frontier) -> None:
    judge = estimator("event", job=JOB, cluster=CLUSTER, measurements=Measurements())
    for point in front.points:
        assert check_plan(point.plan, JOB, CLUSTER) == ()
        estimate = judge.estimate(point.plan)
        assert estimate.fits
        assert (estimate.iteration_s, estimate.money.total_usd) == (point.seconds, point.usd)


@pytest.mark.slow
def test_every_point_keeps_the_jobs_limits(front: Frontier) -> None:
    middle = front.points[len(front.points) // 2]
    dear = frontier(asking(max_usd_per_hour=middle.usd_per_hour), points=4)
    assert max(point.usd_per_hour for point in dear.points) <= middle.usd_per_hour
    slow = frontier(asking(min_iterations_per_s=1 / middle.seconds), points=4)
    assert max(point.seconds for point in slow.points) <= middle.seconds
    assert frontier(asking(max_usd_per_iteration=1e-9)).points == ()


@pytest.mark.slow
def test_the_frontier_is_deterministic(front: Frontier) -> None:
    assert frontier(QUESTION, points=6) == front


def test_unknown_prices_are_refused() -> None:
    pools = tuple(replace(pool, price_usd_per_gpu_hour=None) for pool in CLUSTER.pools)
    with pytest.raises(InputError, match="no price is known"):
        frontier(replace(QUESTION, cluster=replace(CLUSTER, pools=pools)))


# -- the front itself ----------------------------------------------------------------------------

PLAN = Plan(1, (Pipeline(1, (Stage((0, 14), 1, (Place("V100-16", "V100-16x2", FAR),)),)),))


def points(*figures: tuple[float, float]) -> list[FrontierPlan]:
    return [
        FrontierPlan(PLAN, Estimate("event", s, 1, (), Money(usd, 0.0), (), "", MEASURED))
        for s, usd in figures
    ]


def figures(found: Sequence[FrontierPlan]) -> list[tuple[float, float]]:
    return [(point.seconds, point.usd) for point in found]


def test_dominated_plans_are_left_out() -> None:
    given = points((4, 1), (1, 9), (2, 9), (2, 5), (3, 5), (2, 5), (5, 1), (4, 3))
    assert figures(pareto_front(given)) == [(1, 9), (2, 5), (4, 1)]
    assert pareto_front([]) == ()


def test_thinning_keeps_both_ends_and_spreads_the_rest() -> None:
    front = pareto_front(points(*[(2.0**n, 100.0 - n) for n in range(21)]))
    assert figures(thinned(front, 3)) == [(1, 100), (2.0**10, 90), (2.0**20, 80)]
    assert [round(100 - usd) for _, usd in figures(thinned(front, 6))] == [0, 4, 8, 12, 16, 20]
    assert thinned(front, 2) == (front[0], front[-1])
    assert thinned(front, 21) == front
    assert len(thinned(front, 20)) == 20


# -- the command ---------------------------------------------------------------------------------

JOB_FILE = JOB_TEXT.replace("global_batch = 64", "global_batch = 512")
CLUSTER_FILE = f"""{CLUSTER_TEXT}
[[pool]]
zone = "us-west1-a"
gpu = "V100-16"
gpus_per_machine = 2
gpus = 8
"""


def run(folder: Path, *more: str, job: str = JOB_FILE, cluster: str = CLUSTER_FILE) -> Result:
    files = {"job.toml": job, "cluster.toml": cluster}
    return run_on(folder, "frontier", files, "--points", "4", "--budget", "20", *more)


@pytest.mark.slow
def test_saved_plans_simulate_to_the_printed_figures(tmp_path: Path) -> None:
    plot = tmp_path / "front.svg"
    done = run(tmp_path, "--json", "--save", str(tmp_path / "plans"), "--plot", str(plot))
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["points"]
    assert 2 <= len(told) <= 4
    for point in told:
        files = [point["file"], str(tmp_path / "job.toml"), str(tmp_path / "cluster.toml")]
        simulated = CliRunner().invoke(main, ["simulate", *files, "--json"])
        again = json.loads(simulated.stdout)
        for key in ("iteration_s", "throughput_samples_per_s", "cost_usd_per_iteration",
                    "cost_usd_per_hour", "gpus_used"):  # fmt: skip
            assert again[key] == point[key]
    assert sorted(path.name for path in (tmp_path / "plans").iterdir()) == [
        f"plan-{number + 1}.json" for number in range(len(told))
    ]
    drawn = plot.read_text("utf-8")
    for words in ("job: throughput against dollars", "$ an hour", "samples a second", "1: "):
        assert words in drawn


def test_the_table_has_a_line_for_each_plan(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["samples/s", "s/iteration", "$/iteration"]
    assert lines[2].split()[0] == "1"
    assert "on the front" in lines[-1]


@pytest.mark.slow
def test_limits_that_no_plan_keeps_end_with_a_reason(tmp_path: Path) -> None:
    done = run(tmp_path, job=JOB_FILE + "[objective]\nmax_usd_per_hour = 0.001\n")
    assert done.exit_code == 1
    assert "no plan: objective.max_usd_per_hour" in done.stderr


def test_plans_that_miss_the_deadline_are_left_out(tmp_path: Path) -> None:
    def with_deadline(at: datetime, steps: int) -> str:
        job = JOB_FILE.replace("[training]", f"[training]\nsteps = {steps}")
        return job + f'[objective]\ndeadline = "{at:%Y-%m-%dT%H:%M:%SZ}"\n'

    done = run(tmp_path, job=with_deadline(datetime(2001, 1, 1, tzinfo=UTC), 10))
    assert done.exit_code == 1
    assert "objective.deadline: has passed" in done.stderr

    few, steps = ("--points", "2", "--json"), 1_000_000
    ends = json.loads(run(tmp_path, *few).stdout)["points"]
    between_s = sum(end["iteration_s"] for end in ends) / 2
    soon = datetime.now(UTC) + timedelta(seconds=steps * between_s)
    told = json.loads(run(tmp_path, *few, job=with_deadline(soon, steps)).stdout)["points"]
    assert told[0]["iteration_s"] == ends[0]["iteration_s"]
    assert max(point["iteration_s"] for point in told) <= between_s < ends[1]["iteration_s"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--plot", "front.txt"), "use .svg or .png"),
        (("--plot", "nowhere/front.svg"), "cannot be written"),
        (("--points", "1"), "1 is not in the range"),
        (("--estimator", "papr"), 'did you mean "paper"'),
        (("--estimator", "paper"), "the job names no profile"),
    ],
)
def test_mistakes_are_reported_before_the_search(
    tmp_path: Path, more: tuple[str, ...], told: str
) -> None:
    done = run(tmp_path, *more)
    assert done.exit_code == 2
    assert told in done.stderr
