"""Deadlines in replays are met whenever on-demand GPUs could, and cost less than those alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.problem.question import Answer, Question
from planner.replay.run_replay import POLICIES_BY_DEADLINE, Replay, replayed
from sailord.cli.main import main
from sailord.cli.planning.replay import _deadline_json, _deadline_lines, machines_taken
from simulator.api import Measurements
from simulator.traces.play_types import PolicyResult, ReconfigurationCosts
from simulator.traces.trace import trace_of
from tests.planner.replay.test_run_replay import BOTH, COSTS, all_machines, question, run

DAY_S = 86400.0
STEP_S = 4.0
"""Seconds of a step on 16 GPUs; the on-demand pool has as many as the spot pool."""


def played(
    *spot: tuple[float, int], steps: int, seed: int = 0, firm: int = 16, goal: str = "throughput",
    max_usd: float | None = None, costs: ReconfigurationCosts = COSTS,
) -> Replay:  # fmt: skip
    """Replay a day with ``firm`` GPUs on demand, and spot GPUs as (seconds, count)."""
    points = [(at_s, (firm, gpus)) for at_s, gpus in spot]
    given = trace_of("day", iter(points), DAY_S)
    job = question(goal).job
    job = replace(job, steps=steps, objective=replace(job.objective, max_usd_total=max_usd))
    asked = Question(job, BOTH, Measurements())
    return replayed(
        asked, given, costs, taken=machines_taken(given, BOTH, seed), search=by_goal,
        searches=9, deadline_s=DAY_S,
    )  # fmt: skip


def by_goal(asked: Question) -> Answer:
    """The plan on all machines, or with goal ``cost`` on one, which is the cheapest."""
    if asked.job.objective.goal == "throughput":
        return all_machines(asked)
    pools = [replace(pool, gpus=min(4, pool.gpus)) for pool in asked.cluster.pools]
    if all(pool.gpus for pool in pools):
        pools = pools[:1]
    return all_machines(replace(asked, cluster=replace(asked.cluster, pools=tuple(pools))))


def outcome(result: Replay, policy: str) -> PolicyResult:
    return next(each for each in result.policy_results if each.policy == policy)


def on_demand(result: PolicyResult) -> float:
    """GPU-hours on demand."""
    return result.gpu_seconds[0] / 3600


SPOT = [
    ((0, 16),),
    ((0, 0),),
    ((0, 16), (30000, 0)),
    ((0, 4), (30000, 0)),
    ((0, 0), (30000, 16)),
    tuple((3000.0 * n, 16 * (n % 2)) for n in range(28)),
    tuple((700.0 * n, 4 * ((n * n) % 5)) for n in range(123)),
]


@pytest.mark.parametrize("goal", ["throughput", "cost"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("spot", SPOT)
def test_a_deadline_that_on_demand_gpus_can_meet_is_met(
    spot: tuple[tuple[float, int], ...], share: float, goal: str
) -> None:
    steps = int(share * DAY_S / STEP_S)
    result = played(*spot, steps=steps, goal=goal)
    assert result.steady is not None
    assert result.steady.seconds == pytest.approx(steps * STEP_S)
    for each in result.policy_results:
        assert each.ended == "steps", each.policy
        assert each.duration_s <= DAY_S


@pytest.mark.parametrize("goal", ["throughput", "cost"])
@pytest.mark.parametrize("spot", SPOT)
@pytest.mark.parametrize("firm", [4, 16])
def test_work_that_is_lost_long_after_a_checkpoint_is_done_again_in_time(
    spot: tuple[tuple[float, int], ...], goal: str, firm: int
) -> None:
    """On four GPUs on demand it takes four times as long as on the spot GPUs that did it first."""
    costs = replace(COSTS, checkpoint_every_s=5000.0, checkpoint_share=0.01)
    steps = int(0.92 * DAY_S / STEP_S * firm / 16)
    assert played(*spot, steps=steps, firm=firm, goal=goal, costs=costs).missed == ()


def test_with_goal_cost_the_cheapest_on_demand_gpus_that_suffice_are_taken() -> None:
    """One machine on demand takes 60 % of the day; all four would cost more by the step."""
    result = played((0, 0), steps=int(0.6 * DAY_S / 16), goal="cost")
    for policy in POLICIES_BY_DEADLINE[:-1]:
        own = outcome(result, policy)
        on_all_s = sum(
            segment.end_s - segment.start_s
            for segment in own.segments
            if segment.plan is not None and result.figures[segment.plan].gpus[0] == 16
        )
        # The safety net waits until only all of them are left.
        assert (on_all_s < 0.02 * DAY_S) == (policy != "safety-net")
        assert own.ended == "steps"


def test_a_budget_below_the_price_on_demand_keeps_the_safety_net() -> None:
    """Spot GPUs do 58 % of the steps at half of the price, then on-demand GPUs the rest."""
    steps = int(0.6 * DAY_S / STEP_S)
    spot = ((0, 16), (30000, 0))
    for budget, missed in ((1100.0, ()), (900.0, POLICIES_BY_DEADLINE)):
        result = played(*spot, steps=steps, max_usd=budget)
        assert result.steady is not None
        assert result.steady.usd == pytest.approx(1347.84)
        assert result.missed == missed
        for each in result.policy_results:
            assert each.usd is not None
            assert each.usd <= budget


def test_a_budget_that_pays_for_steps_and_checkpoints_on_demand_suffices() -> None:
    """Not each step writes a checkpoint: one in 75 does."""
    costs = replace(COSTS, checkpoint_share=0.01)
    steps = int(0.9 * DAY_S / STEP_S)
    unlimited = played((0, 0), steps=steps, costs=costs)
    assert unlimited.steady is not None
    assert unlimited.steady.usd is not None
    max_usd = 1.005 * unlimited.steady.usd
    assert played((0, 0), steps=steps, costs=costs, max_usd=max_usd).missed == ()


@pytest.mark.parametrize("spot", [((0, 0),), ((0, 16), (3000, 0))])
def test_a_budget_for_the_cheapest_on_demand_gpus_only_suffices(
    spot: tuple[tuple[float, int], ...],
) -> None:
    """All four machines would cost $337, and one of them is in time."""
    result = played(*spot, steps=int(0.6 * DAY_S / 16), goal="cost", max_usd=250.0)
    told = _deadline_json(result)
    assert told is not None
    assert (told["why_not"], told["is_guaranteed"]) == ("", True)
    assert told["on_demand_usd"] == pytest.approx(239.6, abs=1)
    assert result.missed == ()


def test_the_least_dollars_are_no_more_than_what_the_oracle_spends() -> None:
    result = played((0, 16), (30000, 0), steps=15000, max_usd=700.0)
    assert result.least_usd[-1] == outcome(result, "oracle").usd == 700.0


def test_a_budget_below_every_plan_leaves_the_oracle_idle() -> None:
    """Spot GPUs are a hundred times cheaper, and cost more than the budget all the same."""
    firm, spot = BOTH.pools
    cluster = replace(BOTH, pools=(firm, replace(spot, price_usd_per_gpu_hour=0.03)))
    given = trace_of("day", iter([(0.0, (16, 16))]), DAY_S)
    job = replace(question().job, objective=replace(question().job.objective, max_usd_total=0.5))
    result = replayed(
        Question(job, cluster, Measurements()), given, COSTS,
        taken=machines_taken(given, cluster, 0), search=all_machines, searches=9,
    )  # fmt: skip
    oracle = outcome(result, "oracle")
    assert oracle.samples >= max(each.samples for each in result.policy_results)
    assert oracle.idle_s == DAY_S


def test_on_demand_gpus_that_go_before_the_deadline_guarantee_nothing() -> None:
    points = [(0.0, (16, 0)), (600.0, (0, 0))]
    given = trace_of("day", iter(points), DAY_S)
    asked = Question(replace(question().job, steps=2000), BOTH, Measurements())
    result = replayed(
        asked, given, COSTS, taken=machines_taken(given, BOTH, 0), search=all_machines,
        searches=9, deadline_s=DAY_S,
    )  # fmt: skip
    told = _deadline_json(result)
    assert told is not None
    assert not told["is_guaranteed"]
    assert len(result.missed) == len(POLICIES_BY_DEADLINE)


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("more", [1.0, 1.01, 1.05])
@pytest.mark.parametrize("spot", SPOT)
def test_a_budget_that_pays_for_on_demand_is_kept_for_it(
    spot: tuple[tuple[float, int], ...], more: float, share: float
) -> None:
    """Each loss of the spot GPUs wastes minutes that are paid for."""
    costs = ReconfigurationCosts(
        planned_s=375, unplanned_s=750, restart_s=1500, checkpoint_every_s=1500
    )
    steps = int(share * DAY_S / STEP_S)
    alone = played((0, 0), steps=steps, costs=costs)
    assert alone.steady is not None
    assert alone.steady.usd is not None
    result = played(*spot, steps=steps, costs=costs, max_usd=more * alone.steady.usd)
    told = _deadline_json(result)
    assert told is not None
    assert told["is_guaranteed"]
    assert result.missed == ()


def test_spot_gpus_that_cost_more_than_on_demand_are_not_used() -> None:
    firm, spot = BOTH.pools
    assert firm.price_usd_per_gpu_hour is not None
    dear = replace(spot, price_usd_per_gpu_hour=1.01 * firm.price_usd_per_gpu_hour)
    cluster = replace(BOTH, pools=(firm, dear))
    given = trace_of("day", iter([(0.0, (16, 16))]), DAY_S)
    asked = Question(replace(question().job, steps=10000), cluster, Measurements())
    result = replayed(
        asked, given, COSTS, taken=machines_taken(given, cluster, 0), search=all_machines,
        searches=9, deadline_s=DAY_S,
    )  # fmt: skip
    ours = outcome(result, "sailor")
    assert (ours.gpu_seconds[1], ours.ended) == (0, "steps")


def test_spot_plans_that_cost_more_by_the_step_than_on_demand_are_left_out() -> None:
    """On spot all machines are dear, and half of them cheap: each machine costs egress."""

    def by_egress(asked: Question) -> Answer:
        found = all_machines(asked)
        if found.plan is None or found.estimate is None:
            return found
        usd = 0.001 * len(found.plan.pipelines) ** 2
        money = replace(found.estimate.money, egress_usd=usd)
        return replace(found, estimate=replace(found.estimate, money=money))

    used = []
    for spot_usd in (3.5, 3.6):
        firm, spot = BOTH.pools
        cluster = replace(BOTH, pools=(firm, replace(spot, price_usd_per_gpu_hour=spot_usd)))
        points = [(0.0, (8, 16)), (60000.0, (8, 8))]
        given = trace_of("day", iter(points), DAY_S)
        asked = Question(replace(question().job, steps=5000), cluster, Measurements())
        result = replayed(
            asked, given, COSTS, taken=machines_taken(given, cluster, 0), search=by_egress,
            searches=9, deadline_s=DAY_S,
        )  # fmt: skip
        first = outcome(result, "sailor").segments[0].plan
        used.append(first if first is None else result.figures[first].gpus)
    assert used == [(0, 8), None]


def test_plans_within_limits_of_time_and_dollars_are_found() -> None:
    plans = played((0, 16), (30000, 8), steps=100).plans
    state = plans.state((16, 16))
    everything = plans.within(state, iteration_s=1e9, usd=None)
    usd = {plan: plans.known[plan].usd or 0.0 for plan in everything}
    seconds = {plan: plans.known[plan].estimate.iteration_s for plan in everything}
    assert len(set(usd.values())) > 1 < len(set(seconds.values()))
    for plan in everything:
        assert plans.within(state, iteration_s=1e9, usd=usd[plan]) == [
            other for other in everything if usd[other] < usd[plan]
        ]
        assert plans.within(state, iteration_s=seconds[plan], usd=None) == [
            other for other in everything if seconds[other] <= seconds[plan]
        ]
    assert plans.within(plans.state((0, 0)), iteration_s=1e9, usd=None) == []


def test_with_goal_cost_slow_spot_gpus_are_not_used_if_they_save_less() -> None:
    """Half of the machines are cheaper by the step, and leave most steps to on demand."""

    def half_for_cost(asked: Question) -> Answer:
        if asked.job.objective.goal == "throughput":
            return all_machines(asked)
        pools = [replace(pool, gpus=pool.gpus // 2) for pool in asked.cluster.pools]
        return all_machines(replace(asked, cluster=replace(asked.cluster, pools=tuple(pools))))

    usd = []
    for share in (0.4, 0.9):
        given = trace_of("day", iter([(0.0, (16, 16))]), DAY_S)
        asked = Question(
            replace(question("cost").job, steps=int(share * DAY_S / STEP_S)), BOTH, Measurements()
        )
        result = replayed(
            asked, given, COSTS, taken=machines_taken(given, BOTH, 0), search=half_for_cost,
            searches=9, deadline_s=DAY_S,
        )  # fmt: skip
        ours = outcome(result, "sailor")
        assert on_demand(ours) < 0.01 * 16 * 24
        usd.append((ours.usd or 0.0) / ours.steps)
    assert usd[0] < usd[1], "with more time to spare the cheaper ones do"


def test_sailors_own_rule_chooses_checkpoints_by_their_cost() -> None:
    costs = replace(COSTS, checkpoint_share=0.01)
    result = played((0, 16), (20000, 0), steps=9000, costs=costs)
    lost = {each.policy: each.steps_lost for each in result.policy_results}
    # A loss of all GPUs goes back to a checkpoint: 300 s for the other rules.
    assert lost["sailor"] < lost["safety-net"] / 3


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


def test_a_cluster_without_spot_pools_has_nothing_to_wait_for() -> None:
    """Half of the day would do, and the GPUs go after it."""
    points = [(0.0, (16,)), (0.55 * DAY_S, (0,))]
    given = trace_of("day", iter(points), DAY_S)
    asked = question()
    job = replace(asked.job, steps=int(0.5 * DAY_S / STEP_S))
    result = replayed(
        replace(asked, job=job), given, COSTS, taken=machines_taken(given, asked.cluster, 0),
        search=all_machines, searches=9, deadline_s=DAY_S,
    )  # fmt: skip
    assert not any(pool.spot for pool in result.plans.pools)
    assert [each.idle_s for each in result.policy_results] == [0] * 4
    assert result.missed == ()


def test_a_deadline_that_no_gpus_can_meet_is_reported() -> None:
    result = played((0, 0), steps=int(1.1 * DAY_S / STEP_S))
    assert result.steady is not None
    assert result.steady.seconds > DAY_S
    assert {each.ended for each in result.policy_results} == {"trace"}


@pytest.mark.parametrize(
    ("firm", "max_usd", "share", "why_not"),
    [
        (16, None, 0.5, ""),
        (16, 2000.0, 0.5, ""),
        (16, None, 1.1, "on demand the job takes 26.4 h, and 24.0 h are left"),
        (16, 900.0, 0.5, "on demand the job costs $1,123.20, and max_usd_total is $900.00"),
        (0, None, 0.5, "no on-demand GPUs are there for the job, and spot GPUs may go"),
    ],
)
def test_output_says_why_a_deadline_is_not_guaranteed(
    firm: int, max_usd: float | None, share: float, why_not: str
) -> None:
    steps = int(share * DAY_S / STEP_S)
    result = played((0, 0), steps=steps, firm=firm, max_usd=max_usd)
    told = _deadline_json(result)
    assert told is not None
    assert (told["why_not"], told["is_guaranteed"]) == (why_not, not why_not)
    assert told["missed"] == result.missed
    assert (f"deadline    cannot be guaranteed: {why_not}" in _deadline_lines(result)) == bool(
        why_not
    )


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
    assert json.loads(told)["deadline"]["is_guaranteed"]
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
