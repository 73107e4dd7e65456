"""The policy ``sailor`` leaves announced machines in time: not at once, and not too late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.problem.question import Answer, Question
from planner.replay.policies import CheckpointIntervals, SailorPolicy
from planner.replay.run_replay import replayed
from planner.replay.trace_plans import plans_for, spans_of
from sailord.cli.planning.replay import machines_taken
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.estimate.result import Estimate, Money
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from simulator.spec.provenance import MEASURED
from simulator.traces.play_types import PolicyResult, ReconfigurationCosts
from simulator.traces.player import play
from simulator.traces.trace import trace_of

PLACE = Place("A100-40", "A100-40x4", "us-central1-a")
CLUSTER = Cluster((Pool(PLACE.zone, PLACE.gpu, PLACE.machine, 4, 16),), load_catalogue())
QUESTION = Question(Job("small", preset("opt-125m"), 64, 512), CLUSTER, Measurements())
COSTS = ReconfigurationCosts(
    planned_s=5, unplanned_s=10, restart_s=100, checkpoint_every_s=300, checkpoint_share=0.0
)
SLOW = replace(COSTS, planned_s=300, unplanned_s=300, restart_s=300)
NOTICE_S = 600.0


def per_machine(asked: Question) -> Answer:
    """A search by rule: one pipeline for each machine, a second of work for 16 of them."""
    machines = asked.cluster.pools[0].gpus // 4
    if not machines:
        return Answer(None, None, 1, 0.0, 0.0, "throughput")
    plan = Plan(1, (Pipeline(64 // machines, (Stage((0, 14), 4, (PLACE,)),)),) * machines)
    money = Money(None, None)
    estimate = Estimate("event", 16.0 / machines, 64, (), money, (), "", MEASURED)
    return Answer(plan, estimate, 1, 0.0, 0.0, "throughput")


def sailor(
    *points: tuple[float, int], end_s: float = 3000, costs: ReconfigurationCosts = COSTS
) -> PolicyResult:
    """Play a trace with notices of ``NOTICE_S``; the counts exclude announced GPUs."""
    given = trace_of("toy", iter([(at_s, (gpus,)) for at_s, gpus in points]), end_s)
    given = replace(given, notice_s=NOTICE_S)
    taken = machines_taken(given, CLUSTER, 0)
    plans = plans_for(QUESTION, given, taken, per_machine, searches=9)
    figures = plans.figures()
    policy = SailorPolicy(plans, figures, costs, CheckpointIntervals(figures, costs))
    return play(spans_of(given, plans, taken), figures, plans.fits, policy, costs)


def moves(result: PolicyResult) -> list[float]:
    return [each.start_s for each in result.segments if each.kind == "reconfiguring"]


LATE = pytest.approx(1600 - 5 - 30 - 2, abs=2.01)
"""When a job leaves machines that end at 1,600 s: its steps on four of them take 4 s."""


def test_it_trains_on_announced_machines_until_the_move_must_begin() -> None:
    result = sailor((0, 16), (1000, 8))
    assert moves(result) == [LATE]
    assert (result.losses, result.steps_lost, result.downtime_s) == (0, 0, 5)


def test_the_first_end_sets_the_time_and_all_announced_machines_are_left_at_once() -> None:
    assert moves(sailor((0, 16), (1000, 12), (1300, 8))) == [LATE]


def test_a_machine_that_comes_meanwhile_takes_over_in_the_same_move() -> None:
    result = sailor((0, 16), (1000, 12), (1300, 16))
    assert moves(result) == [LATE]
    assert {each.plan for each in result.segments} == {result.segments[0].plan}


def test_a_gain_moves_it_earlier_and_off_the_announced_machines() -> None:
    (moved_s,) = moves(sailor((0, 8), (1000, 4), (1100, 16)))
    assert 1100 <= moved_s < 1300


@pytest.mark.parametrize(("announced_s", "is_finished"), [(1050, False), (1250, True)])
def test_a_move_to_announced_machines_is_finished_only_if_it_trains_longer_there(
    announced_s: float, is_finished: bool
) -> None:
    """Moves take 300 s: after one from 1,000 s to 1,300 s it would train for 16 s, or 216 s."""
    began, again = moves(sailor((0, 8), (1000, 16), (announced_s, 4), costs=SLOW))
    assert began == pytest.approx(1000, abs=8)
    assert (again > announced_s) == is_finished


def test_it_beats_leaving_at_once() -> None:
    given = replace(
        trace_of("toy", iter([(0.0, (16,)), (1000.0, (4,)), (1800.0, (16,))]), 3000.0),
        notice_s=NOTICE_S,
    )
    taken = machines_taken(given, CLUSTER, 0)
    found = replayed(QUESTION, given, COSTS, taken=taken, search=per_machine, searches=9)
    trained = {each.policy: each.samples for each in found.policy_results}
    assert trained["greedy"] < 0.9 * trained["sailor"]
    assert trained["sailor"] <= trained["oracle"]
