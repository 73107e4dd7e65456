"""Several jobs on one trace: at once on parts of the cluster, and one after another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st

from planner.problem.question import Answer, Question
from planner.replay.run_replay import replayed
from planner.replay.several_jobs import LINE, SHARE, SeveralJobs, replayed_together
from planner.share.part_search import worths
from sailord.cli.planning.replay import machines_taken
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.estimate.result import Estimate, Money
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from simulator.spec.provenance import MEASURED
from simulator.traces.play_types import PolicyResult, ReconfigurationCosts
from simulator.traces.trace import Trace, trace_of
from tests.sailord.cli.planning.command_files import CLUSTER_TEXT, JOB_TEXT, run_on

POOLS = tuple(
    Pool(zone, "A100-40", "A100-40x4", 4, 16, price_usd_per_gpu_hour=3.6)
    for zone in ("us-central1-a", "us-central1-b")
)
CLUSTER = Cluster(POOLS, load_catalogue())
COSTS = ReconfigurationCosts(
    planned_s=5, unplanned_s=10, restart_s=100, checkpoint_every_s=300, checkpoint_share=0.0
)


def question(steps: int | None = None, model: str = "opt-125m") -> Question:
    return Question(Job(model, preset(model), 64, 512, steps=steps), CLUSTER, Measurements())


def per_machine(asked: Question) -> Answer:
    """A search by rule: one pipeline for each machine, 16 s of work for n machines in n^0.8."""
    places = [
        Place(pool.gpu, pool.machine, pool.zone)
        for pool in asked.cluster.pools
        for _ in range(pool.gpus // 4)
    ]
    if not places:
        return Answer(None, None, 1, 0.0, 0.0, "throughput")
    pipelines = tuple(
        Pipeline(64 // len(places), (Stage((0, 14), 4, (place,)),)) for place in places
    )
    seconds = 16.0 / len(places) ** 0.8
    money = Money(0.004 * len(places) * seconds, 0.0)
    estimate = Estimate("event", seconds, 64, (), money, (), "", MEASURED)
    return Answer(Plan(1, pipelines), estimate, 1, 0.0, 0.0, "throughput")


def trace(*points: tuple[float, tuple[int, int]], end_s: float) -> Trace:
    return trace_of("toy", iter(points), end_s)


def together(
    given: Trace,
    *steps: int | None,
    weights: tuple[float, ...] | None = None,
    seed: int = 0,
    searches: int = 60,
    begins: tuple[float, ...] | None = None,
) -> SeveralJobs:
    return replayed_together(
        [question(each) for each in steps],
        weights or (1.0,) * len(steps),
        given,
        COSTS,
        taken=machines_taken(given, CLUSTER, seed),
        search=per_machine,
        searches=searches,
        begins=begins,
    )


def gpus_at(found: SeveralJobs, result: PolicyResult, job: int, at_s: float) -> tuple[int, ...]:
    """GPUs that a job's plan holds."""
    for segment in result.segments:
        if segment.start_s <= at_s < segment.end_s and segment.plan is not None:
            return found.jobs[job].figures[segment.plan].gpus
    return (0, 0)


STILL = trace((0, (16, 16)), end_s=1000)


def test_equal_jobs_share_equally_and_weights_count() -> None:
    found = together(STILL, None, None)
    one, two = found.ways[SHARE]
    assert sum(gpus_at(found, one, 0, 10)) == sum(gpus_at(found, two, 1, 10)) == 16
    # 4 of 8 machines do 4^0.8 of 8^0.8.
    assert found.of_alone(SHARE) == pytest.approx([0.5**0.8] * 2, rel=0.01)
    assert found.together(SHARE) == pytest.approx(2 * 0.5**0.8, rel=0.01)
    heavy = together(STILL, None, None, weights=(3.0, 1.0))
    assert [sum(gpus_at(heavy, r, n, 10)) for n, r in enumerate(heavy.ways[SHARE])] == [24, 8]


def test_a_job_with_goal_cost_takes_the_cheapest_plan_and_leaves_the_rest() -> None:
    cheap = question()
    cheap = replace(cheap, job=replace(cheap.job, objective=Objective(goal="cost")))
    taken = machines_taken(STILL, CLUSTER, 0)
    found = replayed_together(
        [cheap, question()], (1.0, 1.0), STILL, COSTS, taken=taken, search=per_machine, searches=60
    )
    few, many = (gpus_at(found, each, job, 10) for job, each in enumerate(found.ways[SHARE]))
    assert sum(few) == 4
    assert sum(many) == 28


def test_a_job_with_goal_cost_prefers_gpus_that_cost_nothing() -> None:
    """Their worth is in samples per dollar, too, and not in samples per second."""
    own = Cluster((POOLS[0], replace(POOLS[1], price_usd_per_gpu_hour=0.0)), load_catalogue())
    plain = replace(question(), cluster=own)
    cheap = replace(plain, job=replace(plain.job, objective=Objective(goal="cost")))

    def search(asked: Question) -> Answer:
        found = per_machine(asked)
        if found.plan is None or found.estimate is None:
            return found
        paid = sum(p.stages[0].places[0].zone == POOLS[0].zone for p in found.plan.pipelines)
        money = Money(0.004 * paid * found.estimate.iteration_s, 0.0)
        return replace(found, estimate=replace(found.estimate, money=money))

    taken = machines_taken(STILL, own, 0)
    found = replayed_together(
        [cheap, plain], (1.0, 1.0), STILL, COSTS, taken=taken, search=search, searches=60
    )
    paid, free = gpus_at(found, found.ways[SHARE][0], 0, 10)
    assert (paid, free > 0) == (0, True)
    job = found.jobs[0]
    pairs = zip(job.figures, worths(job.plans), strict=True)
    worth_of = {figures.gpus: worth for figures, worth in pairs}
    assert worth_of[0, 4] > max(worth for (paid, _), worth in worth_of.items() if paid)


def test_in_line_the_next_job_begins_when_the_first_has_ended() -> None:
    found = together(STILL, 100, 50)
    one, two = found.ways[LINE]
    step_s = 16 / 8**0.8
    assert (one.ended, one.duration_s) == ("steps", pytest.approx(100 * step_s))
    begins = next(each.start_s for each in two.segments if each.kind == "training")
    assert begins == pytest.approx(one.duration_s + COSTS.restart_s)
    assert two.duration_s == pytest.approx(begins + 50 * step_s)
    assert found.of_alone(LINE)[0] == pytest.approx(1, rel=0.01)
    endless = together(STILL, None, 50).ways[LINE][1]
    assert (endless.steps, endless.ended) == (0, "trace")


def test_what_a_job_does_alone_is_counted_until_its_end() -> None:
    """The first job has all machines while it lasts, and half of them are lost later."""
    given = trace((0, (16, 16)), (400, (16, 0)), end_s=2000)
    found = together(given, 100, None)
    assert found.ways[LINE][0].duration_s < 400
    assert found.of_alone(LINE)[0] == pytest.approx(1)
    assert found.of_alone(LINE)[1] < 0.95


def test_a_job_takes_the_machines_of_one_that_has_ended() -> None:
    found = together(STILL, 50, None)
    one, two = found.ways[SHARE]
    assert one.ended == "steps"
    assert sum(gpus_at(found, two, 1, one.duration_s - 1)) == 16
    assert sum(gpus_at(found, two, 1, 999)) == 32
    assert two.reconfigurations == 1


def test_a_job_that_comes_later_takes_its_part_from_the_other() -> None:
    found = together(STILL, None, None, begins=(0.0, 500.0))
    one, two = found.ways[SHARE]
    assert [sum(gpus_at(found, one, 0, at_s)) for at_s in (490, 900)] == [32, 16]
    assert [sum(gpus_at(found, two, 1, at_s)) for at_s in (490, 900)] == [0, 16]
    assert (one.steps_lost, one.losses, one.reconfigurations) == (0, 0, 1)
    # Half of the time alone, then half of the machines.
    assert found.of_alone(SHARE)[0] == pytest.approx((1 + 0.5**0.8) / 2, rel=0.02)
    # What it does is compared with what it would do alone from when it comes.
    assert found.of_alone(SHARE)[1] == pytest.approx(0.5**0.8, rel=0.05)


def test_in_line_jobs_run_in_the_order_of_arrival() -> None:
    found = together(STILL, 50, 50, 50, begins=(300.0, 0.0, 300.0))
    first, second, third = (found.ways[LINE][job] for job in (1, 0, 2))
    begins = [
        next(segment.start_s for segment in each.segments if segment.kind == "training")
        for each in (first, second, third)
    ]
    assert first.duration_s < 300 < begins[1] < second.duration_s < begins[2]
    assert first.ended == second.ended == third.ended == "steps"
    # Nobody waits for the second one, which is alone until the third comes.
    assert begins[1] == pytest.approx(300 + COSTS.restart_s)


def test_a_job_gives_machines_up_in_a_planned_move() -> None:
    """One of two jobs loses nearly all it has; the other one shrinks without a lost step."""
    given = trace((0, (16, 16)), (3600, (16, 0)), end_s=7200)
    found = together(given, None, None)
    results = found.ways[SHARE]
    before = [gpus_at(found, each, job, 3000) for job, each in enumerate(results)]
    assert sorted(before) == [(0, 16), (16, 0)]
    hit = before.index((0, 16))
    assert [sum(gpus_at(found, each, job, 4000)) for job, each in enumerate(results)] == [8, 8]
    gives, gets = results[1 - hit], results[hit]
    assert (gives.losses, gives.steps_lost, gives.reconfigurations) == (0, 0, 1)
    assert gives.downtime_s == COSTS.planned_s
    assert gets.losses == 1
    # The machines come once the other job has finished its step and moved.
    idle = [each for each in gets.segments if each.kind == "idle"]
    handover_s = COSTS.planned_s + 16 / 4**0.8
    assert sum(each.end_s - each.start_s for each in idle) == pytest.approx(handover_s)


def test_a_flapping_machine_is_not_shared_anew_each_time() -> None:
    flaps = [(600 + 20.0 * n, (16, 16 if n % 2 else 8)) for n in range(200)]
    found = together(trace((0, (16, 16)), *flaps, end_s=6000), None, None)
    unhit = min(each.losses + each.reconfigurations for each in found.ways[SHARE])
    assert unhit < 100


def test_a_single_job_is_played_as_without_others() -> None:
    given = trace((0, (16, 8)), (500, (8, 8)), (900, (16, 16)), (2000, (4, 16)), end_s=4000)
    taken = machines_taken(given, CLUSTER, 3)
    found = together(given, None, seed=3)
    alone = replayed(question(), given, COSTS, taken=taken, search=per_machine, searches=60)
    for way in (SHARE, LINE):
        (result,) = found.ways[way]
        assert result.samples == pytest.approx(alone.policy_results[0].samples)
        assert found.together(way) == pytest.approx(1)


@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8
    ),
    st.lists(st.sampled_from([None, 5, 40]), min_size=2, max_size=3),
    st.sampled_from([0.0, 15.0]),
    st.integers(0, 9),
    st.sampled_from([(0.0, 0.0, 0.0), (0.0, 90.0, 90.0), (40.0, 0.0, 170.0)]),
)
def test_no_machine_is_used_twice(
    changes: list[tuple[int, int, int]],
    steps: list[int | None],
    notice_s: float,
    seed: int,
    begins: tuple[float, ...],
) -> None:
    points, now_s = [(0.0, (16, 16))], 0.0
    for seconds, one, two in changes:
        now_s += seconds
        points.append((now_s, (4 * one, 4 * two)))
    given = replace(trace(*points, end_s=now_s + 200), notice_s=notice_s)
    begins = begins[: len(steps)]
    found = together(given, *steps, seed=seed, searches=16, begins=begins)
    for results in found.ways.values():
        starts = {segment.start_s for each in results for segment in each.segments}
        for at_s in sorted(starts | {interval.start_s for interval in given.intervals}):
            # An announced loss, or a machine that is handed over, is used until its moment.
            recent = [
                interval.gpus
                for interval in given.intervals
                if interval.start_s <= at_s and interval.end_s + 25 + notice_s > at_s
            ]
            held = [gpus_at(found, each, job, at_s) for job, each in enumerate(results)]
            for pool in range(2):
                assert sum(gpus[pool] for gpus in held) <= max(gpus[pool] for gpus in recent)
        for each, begins_s in zip(results, begins, strict=True):
            assert all(s.kind == "idle" for s in each.segments if s.start_s < begins_s)
            parts = (each.useful_s, each.lost_s, each.downtime_s, each.idle_s)
            assert sum(parts) == pytest.approx(each.duration_s)


# -- the command ---------------------------------------------------------------------------------

JOB_FILE = JOB_TEXT + "steps = 2000\n"
TRACE_FILE = "end_s = 3000\n[[event]]\ntime_s = 1000\nmachines_change = -2\n"


def run(folder: Path, *more: str, trace: str = TRACE_FILE, job: str = JOB_FILE) -> Result:
    files = {"trace.toml": trace, "a.toml": JOB_FILE, "b.toml": job, "cluster.toml": CLUSTER_TEXT}
    return run_on(folder, "replay", files, "--budget", "4", "--searches", "2", *more)


@pytest.mark.slow
def test_the_command_shows_both_ways(tmp_path: Path) -> None:
    done = run(tmp_path, "--weights", "2,1", "--json")
    assert done.exit_code == 0, done.output
    share, line = json.loads(done.stdout)["ways"]
    assert (share["way"], line["way"]) == ("share", "line")
    assert [each["weight"] for each in share["jobs"]] == [2, 1]
    assert [each["job"] for each in share["jobs"]] == ["a", "b"]
    text = run(tmp_path, "--policy", "line").stdout
    assert [row.split()[:2] for row in text.splitlines()[-3:]] == [
        ["line", "a"], ["line", "b"], ["line", "together"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--weights", "1"), '--weights: is "1"; give 2 numbers above 0'),
        (("--weights", "1,nan"), '--weights: is "1,nan"'),
        (("--weights", "1,x"), '--weights: is "1,x"'),
        (
            ("--begins", "0,-1"),
            '--begins: is "0,-1"; give 2 numbers of seconds',
        ),
        (("--begins", "0,3000"), '--begins: is "0,3000"'),
        (("--deadline", "99"), "--deadline: is for a single job"),
        (("--plot", "x.svg"), "--plot: is for a single job"),
        (("--policy", "oracle"), '--policy: "oracle" is not known'),
    ],
)
def test_options_that_do_not_suit_several_jobs_are_refused(
    tmp_path: Path, more: tuple[str, ...], told: str
) -> None:
    done = run(tmp_path, *more)
    assert done.exit_code == 2
    assert told in done.stderr


def test_several_jobs_need_whole_machines_and_no_deadline(tmp_path: Path) -> None:
    part = run(tmp_path, trace="end_s = 9\n[[event]]\ntime_s = 3\ngpus = 10\n")
    assert "has 10 GPUs of A100-40@us-central1-a at 3 s, where machines have 4" in part.stderr
    late = JOB_FILE + '[objective]\ndeadline = "2030-01-01T00:00:00Z"\n'
    assert "b: objective.deadline: is not kept" in run(tmp_path, job=late).stderr
