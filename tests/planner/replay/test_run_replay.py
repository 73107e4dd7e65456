"""A job on a trace under every policy: its plans, its moves, and the command's output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from planner.library.plan_library import PlanLibrary, learn
from planner.problem.question import Answer, Question
from planner.replay.policies import CheckpointIntervals, SailorPolicy
from planner.replay.run_replay import POLICIES, Replay, replayed
from planner.replay.trace_plans import plans_for, spans_of
from sailord.cli.main import main
from sailord.cli.planning.replay import machines_taken
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.estimate.result import Estimate, Money
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from simulator.spec.provenance import MEASURED
from simulator.traces.play_types import (
    PolicyResult,
    ReconfigurationCosts,
)
from simulator.traces.player import play
from simulator.traces.trace import Trace, trace_of
from tests.sailord.cli.planning.command_files import CLUSTER_TEXT, JOB_TEXT, run_on

PLACE = Place("A100-40", "A100-40x4", "us-central1-a")
POOL = Pool(PLACE.zone, PLACE.gpu, PLACE.machine, 4, 16, price_usd_per_gpu_hour=3.6)
CLUSTER = Cluster((POOL,), load_catalogue())
COSTS = ReconfigurationCosts(
    planned_s=5, unplanned_s=10, restart_s=100, checkpoint_every_s=300, checkpoint_share=0.0
)


def question(goal: str = "throughput") -> Question:
    objective = Objective(goal="cost" if goal == "cost" else "throughput")
    job = Job("small", preset("opt-125m"), 64, 512, objective=objective)
    return Question(job, CLUSTER, Measurements())


def per_machine(asked: Question) -> Answer:
    """A search by rule: one pipeline for each whole machine, a second of work for 16 of them."""
    machines = asked.cluster.pools[0].gpus // 4
    if not machines:
        return Answer(None, None, 1, 0.0, 0.0, "throughput")
    stage = Stage((0, 14), 4, (PLACE,))
    plan = Plan(1, (Pipeline(64 // machines, (stage,)),) * machines)
    seconds = 16.0 / machines
    usd = 4 * machines * 0.001 * seconds + 0.01 * machines  # Wider plans pay more egress.
    money = Money(4 * machines * 0.001 * seconds, usd - 4 * machines * 0.001 * seconds)
    estimate = Estimate("event", seconds, 64, (), money, (), "", MEASURED)
    return Answer(plan, estimate, 1, 0.0, 0.0, "throughput")


def at_most_two_machines(asked: Question) -> Answer:
    """As above, with no use for more than 8 GPUs."""
    (pool,) = asked.cluster.pools
    few = replace(asked.cluster, pools=(replace(pool, gpus=min(8, pool.gpus)),))
    return per_machine(replace(asked, cluster=few))


def trace(*points: tuple[float, int], end_s: float) -> Trace:
    return trace_of("toy", iter([(at_s, (gpus,)) for at_s, gpus in points]), end_s)


def replay(given: Trace, *, goal: str = "throughput", searches: int = 9, seed: int = 0) -> Replay:
    taken = machines_taken(given, CLUSTER, seed)
    return replayed(
        question(goal), given, COSTS, taken=taken, search=per_machine, searches=searches
    )


def outcome(result: Replay, policy: str) -> PolicyResult:
    return next(outcome for outcome in result.policy_results if outcome.policy == policy)


def test_no_policy_beats_the_oracle_nor_the_oracle_the_ideal() -> None:
    for seed in range(20):
        points = [(100 * n + seed, 4 * ((7 * n + seed * n * n) % 5)) for n in range(1, 40)]
        result = replay(trace((0, 16), *points, end_s=4200), seed=seed)
        assert tuple(outcome.policy for outcome in result.policy_results) == POLICIES
        oracle = outcome(result, "oracle")
        assert max(outcome.samples for outcome in result.policy_results) <= oracle.samples * (
            1 + 1e-9
        )
        assert oracle.samples <= result.ideal_samples
        for each in result.policy_results:
            parts = (each.useful_s, each.lost_s, each.downtime_s, each.idle_s)
            assert sum(parts) == pytest.approx(4200)


def test_without_changes_all_policies_are_equal() -> None:
    result = replay(trace((0, 16), end_s=400))
    assert {outcome.steps for outcome in result.policy_results} == {100}
    assert {outcome.reconfigurations for outcome in result.policy_results} == {0}
    assert {round(outcome.usd or 0, 9) for outcome in result.policy_results} == {
        round(100 * (0.064 + 0.04), 9)
    }


def test_a_stable_machine_is_used_and_a_flapping_one_costs_at_most_one_percent() -> None:
    stays = outcome(replay(trace((0, 8), (600, 16), end_s=7200)), "sailor")
    assert stays.reconfigurations == 1
    began = next(segment.start_s for segment in stays.segments if segment.kind == "reconfiguring")
    assert 600 <= began <= 700
    flaps = [(600 + 30 * n, 16 if n % 2 == 0 else 12) for n in range(100)]
    result = replay(trace((0, 12), *flaps, end_s=7200))
    ours = outcome(result, "sailor")
    assert ours.samples >= 0.99 * max(each.samples for each in result.policy_results[1:-1])


def test_a_loss_reconfigures_at_once_and_a_restart_resumes_from_its_checkpoint() -> None:
    result = replay(trace((0, 16), (1000, 8), end_s=2000))
    ours, restart = outcome(result, "sailor"), outcome(result, "restart")
    # 250 steps of 4 s, 10 s down, 990 s with steps of 8 s.
    assert (ours.steps, ours.steps_lost, ours.downtime_s) == (250 + 123, 0, 10)
    # A checkpoint at 900 s: 25 steps are gone, and 100 s until the next one begins.
    assert (restart.steps, restart.steps_lost, restart.downtime_s) == (225 + 112, 25, 100)


def test_machines_idle_from_the_start_do_not_shorten_the_wait_before_a_move() -> None:
    """A fourth machine makes the third one useful, too, and is soon lost again."""

    def two_or_four_machines(asked: Question) -> Answer:
        (pool,) = asked.cluster.pools
        few = replace(asked.cluster, pools=(replace(pool, gpus=pool.gpus // 8 * 8),))
        return per_machine(replace(asked, cluster=few))

    given, costs = trace((0, 12), (100, 16), (400, 12), end_s=7200), replace(COSTS, planned_s=3000)
    taken, search = [((),), ((),), ((12, 13, 14, 15),)], two_or_four_machines
    result = replayed(question(), given, costs, taken=taken, search=search, searches=9)
    assert outcome(result, "sailor").reconfigurations == 0


def test_a_job_that_ends_soon_does_not_move() -> None:
    """Machines that come late save less time than the move takes."""
    given = trace((0, 8), (700, 16), end_s=2000)
    taken = machines_taken(given, CLUSTER, 0)
    costs = replace(COSTS, planned_s=60)
    for steps, moves in ((300, 1), (100, 0)):
        asked = replace(question(), job=replace(question().job, steps=steps))
        result = replayed(asked, given, costs, taken=taken, search=per_machine, searches=9)
        assert outcome(result, "sailor").reconfigurations == moves


def test_ignore_additions_never_uses_more_gpus() -> None:
    given = trace((0, 8), (500, 16), (1000, 4), (1500, 16), end_s=3000)
    for seed in range(4):
        result = replay(given, seed=seed)
        used = [
            result.figures[segment.plan].gpus[0]
            for segment in outcome(result, "ignore-additions").segments
            if segment.plan is not None
        ]
        assert used == sorted(used, reverse=True)
        assert max(used) == 8


def test_a_cost_goal_runs_the_cheapest_plans() -> None:
    fast = replay(trace((0, 16), end_s=400))
    cheap = replay(trace((0, 16), (200, 4), end_s=400), goal="cost")
    assert outcome(fast, "sailor").gpu_seconds == (6400,)
    # Of the plans for 16 and for 4 GPUs the small one is cheaper by the iteration, all along.
    assert outcome(cheap, "sailor").gpu_seconds == (1600,)


def plans_of(given: Trace, searches: int) -> PlanLibrary:
    return plans_for(
        question(), given, machines_taken(given, CLUSTER, 0), per_machine, searches=searches
    )


def test_the_longest_availabilities_are_searched_first() -> None:
    given = trace((0, 16), (10, 8), (500, 4), (600, 12), end_s=620)
    plans = plans_of(given, 2)
    assert plans.searched == 2
    assert [known.plan.device_count for known in plans.known] == [8, 4]
    # The others take the best that is known.
    assert plans.best(plans.state((16,))) == 0
    assert plans.best(plans.state((12,))) == 0
    assert plans.best(plans.state((3,))) is None


def test_an_availability_without_a_fitting_plan_is_always_searched() -> None:
    plans = plans_of(trace((0, 16), (500, 4), (600, 8), end_s=620), 1)
    assert plans.searched == 2
    assert [known.plan.device_count for known in plans.known] == [16, 4]


def test_availabilities_below_one_without_a_plan_are_not_searched() -> None:
    given = trace((0, 3), (100, 2), (150, 1), (160, 0), end_s=170)
    plans = plans_of(given, 9)
    assert plans.searched == 1
    assert not plans.known


SPOT = replace(POOL, gpus=16, spot=True, price_usd_per_gpu_hour=0.9)
BOTH = Cluster((POOL, SPOT), load_catalogue())


def all_machines(asked: Question) -> Answer:
    """The same plan by rule for the machines of both pools."""
    total = sum(pool.gpus for pool in asked.cluster.pools)
    one = replace(asked.cluster, pools=(replace(POOL, gpus=total),))
    return per_machine(replace(asked, cluster=one))


def replay_both(*points: tuple[float, tuple[int, int]], end_s: float, **limits: Any) -> Replay:
    job = question().job
    objective = replace(job.objective, max_usd_total=limits.pop("max_usd_total", None))
    job = replace(job, objective=objective, **limits)
    given = trace_of("two", iter(points), end_s)
    taken = machines_taken(given, BOTH, 0)
    asked = Question(job, BOTH, Measurements())
    return replayed(asked, given, COSTS, taken=taken, search=all_machines, searches=9)


def test_spot_and_on_demand_gpus_of_one_place_keep_their_prices() -> None:
    """The same plan runs on spot GPUs first, then on demand."""
    result = replay_both((0, (0, 16)), (1000, (16, 0)), end_s=2000)
    assert result.plans.distinct_plans == 1
    assert result.plans.names == (
        "A100-40/A100-40x4/us-central1-a",
        "A100-40/A100-40x4/us-central1-a spot",
    )
    for each in result.policy_results:
        on_demand, spot = each.gpu_seconds
        assert on_demand > 0 < spot or each.policy == "ignore-additions"
        egress = each.usd - (on_demand * 3.6 + spot * 0.9) / 3600 if each.usd is not None else 0
        trained_s = sum(s.end_s - s.start_s for s in each.segments if s.kind == "training")
        # $0.04 of egress in each of the steps of 4 s.
        assert egress == pytest.approx(0.01 * trained_s)


def test_the_cheaper_of_equally_fast_plans_is_taken() -> None:
    result = replay_both((0, (16, 16)), (500, (8, 16)), end_s=1000)
    ours = outcome(result, "sailor")
    on_demand, spot = ours.gpu_seconds
    fast = [known for known in result.plans.known if sum(known.gpus) == 32]
    assert [known.gpus for known in fast] == [(16, 16)]
    slower = [known.gpus for known in result.plans.known if sum(known.gpus) == 24]
    assert sorted(slower) == [(8, 16), (16, 8)]
    # 500 s on all, then on eight GPUs on demand and sixteen spot ones.
    assert (on_demand, spot) == pytest.approx((16 * 500 + 8 * 500, 16 * 1000))


@pytest.mark.parametrize(("limit", "searched"), [(3.0, 2), (None, 1)])
def test_a_part_of_a_place_with_two_contracts_is_searched_although_the_whole_has_no_plan(
    limit: float | None, searched: int
) -> None:
    """On-demand GPUs are charged first: spot ones alone may be what the limit allows."""
    both = replace(CLUSTER, pools=(POOL, replace(POOL, spot=True, price_usd_per_gpu_hour=0.5)))
    asked = question()
    objective = replace(asked.job.objective, max_usd_per_hour=limit)
    asked = replace(asked, job=replace(asked.job, objective=objective), cluster=both)
    plans = PlanLibrary(asked)
    for gpus in ((4, 4), (0, 4)):
        learn(plans, gpus, lambda _: Answer(None, None, 1, 0.0, 0.0, "throughput"))
    assert plans.searched == searched


def test_plans_without_prices_are_compared_by_egress() -> None:
    def known(egress_usd: float, seconds: float) -> tuple[Plan, Estimate]:
        asked = per_machine(question())
        assert asked.plan is not None
        assert asked.estimate is not None
        money = Money(None, egress_usd, (), unpriced=("x",))
        plan = replace(asked.plan, micro_batch_size=round(1 + egress_usd))
        return plan, replace(asked.estimate, iteration_s=seconds, money=money)

    plans = PlanLibrary(replace(question(), cluster=replace(CLUSTER, pools=(UNPRICED,))))
    state = plans.state((16,))
    for egress_usd, seconds in ((3.0, 4.0), (1.0, 4.003), (0.0, 4.1)):
        plans.add(*known(egress_usd, seconds))
    best = plans.best(state)
    assert best is not None
    assert plans.known[best].estimate.money.egress_usd == 1.0


UNPRICED = replace(POOL, price_usd_per_gpu_hour=None)


def test_a_job_ends_after_its_steps() -> None:
    result = replay_both((0, (16, 0)), (1000, (8, 0)), end_s=5000, steps=300)
    for each in result.policy_results:
        assert (each.steps, each.ended) == (pytest.approx(300), "steps"), each.policy
    # 250 steps of 4 s, 10 s down, 50 of 8 s.
    assert outcome(result, "sailor").duration_s == pytest.approx(1000 + 10 + 400)
    assert outcome(result, "oracle").duration_s <= 1000 + 10 + 400
    short = replay_both((0, (16, 0)), end_s=400, steps=300)
    assert {each.ended for each in short.policy_results} == {"trace"}


def test_a_job_ends_when_its_budget_is_spent() -> None:
    whole = outcome(replay_both((0, (16, 16)), (400, (8, 0)), end_s=800), "sailor")
    assert whole.usd is not None
    half = whole.usd / 2
    result = replay_both((0, (16, 16)), (400, (8, 0)), end_s=800, max_usd_total=half)  # fmt: skip
    for each in result.policy_results:
        assert each.usd is not None
        assert each.usd <= whole.usd / 2 * (1 + 1e-9), each.policy
        assert each.samples <= outcome(result, "oracle").samples * (1 + 1e-9)
        if each.policy != "ignore-additions":
            assert each.ended == "budget", each.policy


@pytest.mark.slow
def test_no_policy_spends_less_than_the_least_for_its_samples() -> None:
    tight = 0
    for seed in range(10):
        points = [(100.0 * n + seed, (4 * ((7 * n + seed) % 5), 4 * ((3 * n * n) % 4)))
                  for n in range(1, 30)]  # fmt: skip
        result = replay_both((0, (16, 0)), *points, end_s=3200)
        for each, least in zip(result.policy_results, result.least_usd, strict=True):
            assert each.usd is not None
            assert least is not None
            assert least <= each.usd * (1 + 1e-9)
            tight += least > 0.5 * each.usd
    assert tight > 10, "the bound says next to nothing"


def test_a_notice_makes_a_loss_a_planned_move() -> None:
    given = replace(trace((0, 16), (1000, 8), end_s=2000), notice_s=30.0)
    result = replay(given)
    ours = outcome(result, "sailor")
    assert (ours.losses, ours.lost_s, ours.downtime_s) == (0, pytest.approx(4, abs=4.01), 5)
    assert ours.samples <= outcome(result, "oracle").samples
    plain = outcome(replay(trace((0, 16), (1000, 8), end_s=2000)), "sailor")
    assert plain.losses == 1
    # Without the time to finish a step, a notice does not help.
    late = outcome(replay(replace(given, notice_s=1e-3)), "sailor")
    assert late.losses <= 1


def test_a_plan_moves_to_spare_machines_before_its_own_leave() -> None:
    """All policies that move the job, by the same plan, which more machines would not help."""
    given = replace(trace((0, 16), (1000, 8), end_s=2000), notice_s=30.0)
    taken = [((),), (tuple(range(8)),)]
    narrow = replayed(
        question(), given, COSTS, taken=taken, search=at_most_two_machines, searches=9
    )
    for each in narrow.policy_results[:-1]:
        if each.policy != "restart":
            assert (each.losses, each.steps_lost, each.downtime_s) == (0, 0, 5), each.policy


def test_where_no_plan_fits_a_notice_is_trained_through() -> None:
    given = replace(trace((0, 16), (1000, 0), (1500, 16), end_s=2000), notice_s=30.0)
    for each in replay(given).policy_results[:-1]:
        idle = next(part for part in each.segments if part.kind == "idle")
        assert idle.start_s == 1030, each.policy


def test_each_loss_of_the_state_counts_for_the_interval_of_checkpoints() -> None:
    """Also one that comes before the policy is asked for a decision after the restart."""
    given = trace(*((1000.0 * n, 16 * (1 - n % 2)) for n in range(8)), end_s=8000)
    taken = machines_taken(given, CLUSTER, 0)
    plans = plans_for(question(), given, taken, per_machine, searches=9)
    figures = plans.figures()
    intervals = CheckpointIntervals(figures, COSTS)
    policy = SailorPolicy(plans, figures, COSTS, intervals)
    played = play(spans_of(given, plans, taken), figures, plans.fits, policy, COSTS)
    assert (played.losses, intervals.cold_losses) == (4, 4)


def test_a_lost_machine_of_either_pool_is_known_by_its_pool() -> None:
    given = trace_of("two", iter([(0.0, (8, 8)), (10.0, (4, 4))]), 20.0)
    asked = Question(question().job, BOTH, Measurements())
    taken = (((), ()), ((0, 1, 2, 3), (4, 5, 6, 7)))
    plans = plans_for(asked, given, taken, all_machines, searches=1)
    first, second = spans_of(given, plans, taken)
    assert (first.up, second.up) == ((8, 8), (4, 4))
    assert second.lost == taken[1]


def test_whole_machines_are_lost_by_seed() -> None:
    given = trace((0, 16), (10, 8), (20, 8 + 4), (30, 6), end_s=40)
    drawn = [machines_taken(given, CLUSTER, seed) for seed in range(8)]
    assert drawn[0] == machines_taken(given, CLUSTER, 0)
    assert len({tuple(each) for each in drawn}) > 1
    for start, second, third, last in drawn:
        assert start == third == ((),)
        assert len(second[0]) == 8
        assert len({slot // 4 for slot in second[0]}) == 2
        assert len(last[0]) == 6


def test_the_nodes_that_a_trace_names_are_lost() -> None:
    up = (("a", "b", "c", "d"), ("a", "c"), ("c", "e"), ("c", "e", "f"))
    points = iter([(10.0 * n, (4 * len(names),)) for n, names in enumerate(up)])
    given = trace_of("named", points, 40.0, [(names,) for names in up])
    for seed in range(3):
        assert machines_taken(given, CLUSTER, seed) == [
            ((),), ((4, 5, 6, 7, 12, 13, 14, 15),), ((0, 1, 2, 3),), ((),)
        ]  # fmt: skip


def test_a_replaced_node_is_a_loss_to_every_policy() -> None:
    names = [(("a", "b", "c", "d"),), (("b", "c", "d", "e"),)]
    given = trace_of("named", iter([(0.0, (16,)), (1000.0, (16,))]), 2000.0, names)
    result = replay(given)
    ours = outcome(result, "sailor")
    assert (ours.losses, ours.downtime_s) == (1, COSTS.unplanned_s)
    assert max(each.samples for each in result.policy_results) == outcome(result, "oracle").samples


# -- the command ---------------------------------------------------------------------------------

TRACE_FILE = """
end_s = 3000
[[event]]
time_s = 1000
machines_change = -2
[[event]]
time_s = 2000
machines_change = 1
"""


def run(folder: Path, *more: str, trace: str = TRACE_FILE, cluster: str = CLUSTER_TEXT) -> Result:
    files = {"trace.toml": trace, "job.toml": JOB_TEXT, "cluster.toml": cluster}
    return run_on(folder, "replay", files, "--budget", "10", *more)


@pytest.mark.slow
def test_the_command_prints_and_plots_all_policies(tmp_path: Path) -> None:
    plot = tmp_path / "replay.svg"
    done = run(tmp_path, "--json", "--plot", str(plot))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [each["policy"] for each in found["policies"]] == list(POLICIES)
    assert (found["changes"], found["duration_s"]) == (2, 3000)
    for each in found["policies"]:
        assert 0 < each["share_of_ideal"] <= 1
        parts = ("useful_s", "lost_s", "downtime_s", "standing_s")
        assert sum(each[part] for part in parts) == pytest.approx(3000)
        (gpu_seconds,) = each["gpu_seconds"].values()
        assert each["cost_usd"] > 0
        assert 0 < gpu_seconds <= 16 * 3000
    drawn = plot.read_text("utf-8")
    for words in ("trace: training while GPUs come and go", "of ideal", "minutes",
                  *(f"{policy}: GPUs used" for policy in POLICIES)):  # fmt: skip
        assert words in drawn
    assert run(tmp_path, "--json").stdout == done.stdout


def test_the_table_shows_the_requested_policies(tmp_path: Path) -> None:
    done = run(tmp_path, "--policy", "oracle, sailor", "--restart-s", "300")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("trace       trace: 50 min, 2 changes, 8 to 16 GPUs")
    assert [line.split()[0] for line in lines[-2:]] == ["sailor", "oracle"]


def test_a_trace_without_enough_gpus_says_so(tmp_path: Path) -> None:
    none = "end_s = 60\n[[event]]\ntime_s = 0\ngpus = 0\n"
    done = run(tmp_path, trace=none)
    assert done.exit_code == 1
    assert done.stderr.strip() == (
        "the job never runs: no availability of trace has a plan for it; at most 0 GPUs are up"
    )
    assert [line.split()[1] for line in done.stdout.splitlines()[-4:]] == ["0"] * 4


@pytest.mark.slow
def test_limits_that_no_plan_keeps_are_named(tmp_path: Path) -> None:
    (tmp_path / "poor.toml").write_text(JOB_TEXT + "[objective]\nmax_usd_per_hour = 0.001\n")
    run(tmp_path)
    files = [str(tmp_path / name) for name in ("trace.toml", "poor.toml", "cluster.toml")]
    done = CliRunner().invoke(main, ["replay", *files, "--budget", "5"])
    assert done.exit_code == 1
    assert "the job never runs" in done.stderr
    assert "no plan: objective.max_usd_per_hour: is 0.001" in done.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--policy", "sailer"), 'did you mean "sailor"'),
        (("--plot", "x.pdf"), "use .svg or .png"),
        (("--trace", "other"), "leave --trace out"),
        (("--until", "0"), "0.0 is not in the range"),
        (("--until", "nan"), "nan is not a finite number"),
        (("--restart-s", "inf"), "inf is not a finite number"),
        (("--planned-s", "-1"), "-1.0 is not in the range"),
    ],
)
def test_mistakes_are_reported(tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    done = run(tmp_path, *more)
    assert done.exit_code == 2
    assert words in done.stderr
