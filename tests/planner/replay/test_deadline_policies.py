"""Deadlines in replays are met whenever on-demand GPUs could, and cost less than those alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.problem.question import Question
from planner.replay.run_replay import POLICIES_BY_DEADLINE, Replay, replayed
from sailord.cli.main import main
from sailord.cli.planning.replay import machines_taken
from simulator.api import Measurements
from simulator.traces.play_types import PolicyResult
from simulator.traces.trace import trace_of
from tests.planner.replay.test_run_replay import BOTH, COSTS, all_machines, question, run

DAY_S = 86400.0
STEP_S = 4.0
"""Of the plan on 16 GPUs; the on-demand pool has as many as the spot pool."""


def played(*spot: tuple[float, int], steps: int, seed: int = 0) -> Replay:
    """A day with 16 GPUs on demand, and spot GPUs as given."""
    points = [(at_s, (16, gpus)) for at_s, gpus in spot]
    given = trace_of("day", iter(points), DAY_S)
    asked = Question(replace(question().job, steps=steps), BOTH, Measurements())
    return replayed(
        asked, given, COSTS, taken=machines_taken(given, BOTH, seed), search=all_machines,
        searches=9, deadline_s=DAY_S,
    )  # fmt: skip


def outcome(result: Replay, policy: str) -> PolicyResult:
    return next(each for each in result.policy_results if each.policy == policy)


def on_demand(result: PolicyResult) -> float:
    """GPU-hours on demand."""
    return result.gpu_seconds[0] / 3600


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize(
    "spot",
    [
        ((0, 16),),
        ((0, 0),),
        ((0, 16), (30000, 0)),
        ((0, 0), (30000, 16)),
        tuple((3000.0 * n, 16 * (n % 2)) for n in range(28)),
        tuple((700.0 * n, 4 * ((n * n) % 5)) for n in range(123)),
    ],
)
def test_a_deadline_that_on_demand_gpus_can_meet_is_met(
    spot: tuple[tuple[float, int], ...], share: float
) -> None:
    steps = int(share * DAY_S / STEP_S)
    result = played(*spot, steps=steps)
    assert result.slowest_s == pytest.approx(steps * STEP_S)
    for each in result.policy_results:
        assert each.ended == "steps", each.policy
        assert each.duration_s <= DAY_S


def test_spot_gpus_that_last_are_used_alone() -> None:
    for policy in POLICIES_BY_DEADLINE[:-1]:
        assert on_demand(outcome(played((0, 16), steps=15000), policy)) == 0


def test_on_demand_gpus_are_bought_only_if_spot_time_does_not_suffice() -> None:
    """Spot GPUs for half of the day, and a job that needs two thirds of it."""
    result = played(
        *((3000.0 * n, 16 * (n % 2)) for n in range(28)), steps=int(DAY_S / STEP_S / 1.5)
    )
    all_hours = 16 * 24 / 1.5
    for policy in ("sailor", "uniform-progress"):
        assert 0.1 * all_hours < on_demand(outcome(result, policy)) < 0.6 * all_hours
    least = result.least_usd[0]
    assert least is not None
    for each in result.policy_results[:-1]:
        assert each.usd is not None
        assert least <= each.usd


def test_a_job_that_is_ahead_buys_nothing_while_it_waits() -> None:
    result = played((0, 16), (20000, 0), (40000, 16), steps=9000)
    assert on_demand(outcome(result, "sailor")) == 0
    assert outcome(result, "sailor").idle_s > 0


def test_a_deadline_that_no_gpus_can_meet_is_reported() -> None:
    result = played((0, 0), steps=int(1.1 * DAY_S / STEP_S))
    assert result.slowest_s is not None
    assert result.slowest_s > DAY_S
    assert {each.ended for each in result.policy_results} == {"trace"}


CLUSTER_FILE = """
[[pool]]
zone = "us-central1-a"
gpu = "A100-40"
gpus_per_machine = 4
gpus = 8
price_usd_per_gpu_hour = 3.0
[[pool]]
zone = "us-central1-a"
gpu = "A100-40"
gpus_per_machine = 4
gpus = 8
spot = true
price_usd_per_gpu_hour = 1.0
"""
TRACE_FILE = """
starts_at = "2026-01-01T00:00:00Z"
end_s = 8000
[[event]]
time_s = 1000
spot = true
gpus = 0
"""


@pytest.mark.slow
def test_the_command_takes_seconds_and_dates(tmp_path: Path) -> None:
    files = {"trace": TRACE_FILE, "cluster": CLUSTER_FILE}
    none = run(tmp_path, "--deadline", "5000", **files)
    assert none.exit_code == 2
    assert "set training.steps" in none.stderr
    job = tmp_path / "job.toml"
    text = job.read_text().replace("[training]", "[training]\nsteps = 300")
    job.write_text(text)
    args = [str(tmp_path / name) for name in ("trace.toml", "job.toml", "cluster.toml")]

    def replay(*more: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["replay", *args, "--budget", "10", *more])
        return done.exit_code, done.output

    code, told = replay("--deadline", "5000", "--json")
    assert code == 0, told
    by_seconds = json.loads(told)["policies"]
    assert [each["policy"] for each in by_seconds] == list(POLICIES_BY_DEADLINE)
    job.write_text(text + '[objective]\ndeadline = "2026-01-01T01:23:20Z"\n')
    code, told = replay("--json")
    assert json.loads(told)["policies"] == by_seconds
    code, told = replay("--from", "6000")
    assert (code, "before the replay begins" in told) == (2, True)
    code, told = replay("--deadline", "9000")
    assert (code, "the trace ends at 8000" in told) == (2, True)
    plot = tmp_path / "replay.svg"
    code, told = replay("--plot", str(plot))
    assert "deadline    83 min" in told
    assert "safety-net: GPUs used" in plot.read_text("utf-8")
