"""On-demand instances are wanted for a deadline in time, and no longer than it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import JobId, JobRecord
from sailord.capacity.core import model
from sailord.capacity.core.deadline import pace_record, watches_deadline
from sailord.capacity.core.deadline_model import (
    Choice,
    DeadlineOptions,
    JobProgress,
    PaceRecord,
)
from sailord.capacity.core.decide import decide
from sailord.capacity.core.model import BootRecord, CapacityRecord, PauseJob, Tell
from sailord.capacity.core.planner_view import progress_of, work_left
from sailord.planning.messages import WorkLeft
from sailord.providers.interface import Pool
from tests.sailord.capacity.core.story import A, Story, instance
from tests.sailord.core.states import state

FIRM = Pool("zone-a", "large", "gpu", 4, spot=False)
PRICES = {A: 1.0, FIRM: 4.0}
HOUR = 3600.0
ALONE = Choice({FIRM: 2}, 10.0, 8.0)
STARVED = DeadlineOptions("j", {A: 0}, None, ALONE, ALONE)
FED = replace(STARVED, spot={A: 2}, spot_now=Choice({A: 2}, 10.0, 2.0))
JOB = JobProgress("j", 0.0, 0, 360, 3 * HOUR)
"""An hour of work on demand in three hours, begun at 0."""


class Due(Story):
    """A story of a job with a deadline."""

    def __init__(self, options=STARVED, policy=None, books=None) -> None:
        super().__init__(policy or model.CapacityPolicy(surplus_s=60.0), books)
        self.hear(model.PricesRead(0.0, PRICES))
        self.see(0.0)
        self.hear(model.TargetSet(0.0, options.spot, options))

    def at(self, now: float, step: int = 0, **about) -> Due:
        self.hear(model.ProgressSeen(now, replace(JOB, step=step, **about)))
        return self

    def options(self, options: DeadlineOptions) -> Due:
        self.hear(model.TargetSet(self.state.now, options.spot, options))
        return self

    @property
    def firm(self) -> int:
        """On-demand instances that are wanted."""
        return self.state.target.get(FIRM, 0)

    @property
    def why(self) -> str:
        return self.state.pace.why

    def told(self):
        return [(order.text, order.is_at_risk) for order in self.of(Tell)]


def test_a_job_with_time_to_spare_waits_for_spot():
    story = Due().at(600.0, step=60)
    assert story.firm == 0
    assert story.why == "waits for spot instances; 116 min to spare"


def test_a_job_with_little_time_to_spare_buys_on_demand_and_says_so_once():
    story = Due().at(5000.0, step=90)
    assert story.firm == 0
    story.at(5600.0, step=90)
    assert story.firm == 2, "changes to spot instances and back may still take as long"
    text = "only 37 min to spare: renting 2 on-demand large until spot instances arrive"
    assert story.told() == [(text, False)]
    assert story.asks() == [(FIRM, 2)]
    assert story.at(5601.0, step=90).told() == [], "the figures alone are no news"


def test_on_demand_instances_are_kept_until_spot_instances_come():
    """Steps of a day in two days, and none on spot: boots and losses do not release them."""
    story, about = Due(), {"steps": 8640, "deadline": 48 * HOUR}
    wanted = []
    for now in range(0, 30 * 3600, 600):
        story.at(float(now), redo_s=float(now % 1800), **about)
        wanted.append(story.firm)
    assert wanted == sorted(wanted), "none, then two"
    assert (wanted[0], wanted[-1]) == (0, 2)


def test_the_preferred_plan_is_kept_where_the_fastest_one_exceeds_the_budget():
    cheap, fast = Choice({FIRM: 1}, 20.0, 4.0), Choice({FIRM: 4}, 8.0, 16.0)
    story = Due(replace(FED, on_demand=cheap, fastest=fast))
    assert story.at(100.0, usd_left=9.5, deadline=30 * HOUR).firm == 0
    story.at(200.0, usd_left=8.5, deadline=30 * HOUR)
    assert story.state.target == {FIRM: 1}
    assert story.state.pace.is_committed
    story.at(300.0, step=5, usd_left=8.4, deadline=30 * HOUR)
    assert story.state.target == {FIRM: 1}


def test_a_budget_does_not_buy_before_time_is_short():
    story = Due().at(100.0, usd_left=9.6)
    assert story.firm == 0
    assert "waits" in story.why


def test_on_demand_instances_are_released_once_spot_instances_are_up():
    story = Due().at(5600.0, step=90)
    assert story.firm == 2
    story.options(FED).at(5700.0, step=95)
    assert story.state.target == {A: 2}
    assert "spot instances suffice" in story.why


def test_the_last_chance_is_taken_and_kept():
    work_s = 360 * 10.0
    change_s = 10.0 + 180.0 + 60.0 + 10.0
    for_sure = 3 * HOUR - work_s - change_s
    story = Due(FED)
    assert story.at(for_sure - 1.0).state.target == {A: 2}, "spot instances suffice until then"
    story.at(for_sure)
    assert story.state.target == {FIRM: 2}
    assert "only on-demand instances can still make it: 2 on-demand large to the end" in story.why
    story.at(for_sure + 100.0, step=200)
    assert story.state.target == {FIRM: 2}, "there is no way back"
    assert story.state.pace.is_committed


def test_work_that_a_loss_repeats_brings_the_last_chance_forward():
    story = Due(FED).at(5000.0)
    assert story.firm == 0
    assert story.at(5000.0, redo_s=2000.0).firm == 2


def test_slower_steps_than_predicted_start_on_demand_instances_earlier():
    assert Due(FED).at(5000.0, slower=2.0).firm == 2


def test_few_spot_instances_are_kept_beside_on_demand_ones():
    slow = Choice({A: 1}, 30.0, 1.0)
    story = Due(replace(STARVED, spot={A: 1}, spot_now=slow)).at(5600.0, step=90)
    assert story.state.target == {A: 1, FIRM: 2}
    assert "2 on-demand large until" in story.why


def test_no_spot_is_sought_beside_on_demand_that_the_hourly_budget_does_not_pay_for():
    policy = model.CapacityPolicy(usd_per_hour_max=9.0)
    story = Due(replace(STARVED, spot={A: 2}), policy).at(5600.0, step=90)
    assert story.state.target == {FIRM: 2}
    story = Due(replace(STARVED, spot={A: 2})).at(5600.0, step=90)
    assert story.state.target == {A: 2, FIRM: 2}


def test_the_fastest_plan_replaces_a_cheaper_one_that_would_be_late():
    cheap = Choice({FIRM: 1}, 20.0, 4.0)
    options = replace(STARVED, on_demand=cheap)
    story = Due(options).at(1800.0, step=0)
    assert story.firm == 1
    story = Due(options).at(5000.0, step=0)
    assert story.firm == 2
    assert "until spot instances arrive" in story.why, "the fastest plan has time to spare"


def due_on(count: int, *, committed: bool, deadline: float, options: DeadlineOptions) -> Due:
    """A story of a job that runs on this many on-demand instances."""
    books = CapacityRecord(pace=PaceRecord("j", is_committed=committed))
    story = Due(options, books=books)
    story.see(10.0, *(instance(number, FIRM) for number in range(1, count + 1)))
    agents = {f"n{number}": model.Agent(4) for number in range(1, count + 1)}
    story.hear(model.AgentsCounted(20.0, agents, frozenset(agents)))
    return story.at(30.0, is_running=True, deadline=deadline)


CHEAP_OR_FAST = replace(STARVED, on_demand=Choice({FIRM: 1}, 12.0, 4.0))


def test_a_committed_job_stays_on_the_fastest_plan_to_the_end():
    """The cheaper plan would meet the deadline, too, if the moves to it and back took no time."""
    story = due_on(2, committed=True, deadline=3600.0 + 30 + 200, options=CHEAP_OR_FAST)
    for step in range(0, 360, 5):
        story.at(30.0 + 10.0 * step, step=step, is_running=True, deadline=3600.0 + 30 + 200)
        assert story.firm == 2, step
        assert story.state.pace.is_committed


def test_a_cheaper_plan_must_pay_for_the_time_of_the_move():
    """For the last 100 steps the cheaper plan would be fast enough, without the time of the move
    to it."""
    spare_s = 200.0 + 30.0
    deadline = 3600.0 + 30 + spare_s
    story = due_on(2, committed=False, deadline=deadline, options=CHEAP_OR_FAST)
    for step in range(0, 360, 5):
        story.at(30.0 + 10.0 * step, step=step, is_running=True, deadline=deadline)
        if not story.state.pace.is_committed:
            slack_s = deadline - 30.0 - 10.0 * step - (360 - step) * 12.0
            assert story.firm != 1 or slack_s > 80.0, step


def test_a_deadline_that_will_be_missed_is_reported_once_as_at_risk():
    story = Due().at(8000.0)
    ((text, risk),) = story.told()
    assert risk
    assert text.startswith("the deadline will be missed by 13 min or more: only on-demand")
    assert story.at(8600.0).told() == []
    assert story.firm == 2, "it is to be late by as little as possible"
    assert story.state.pace.is_late
    assert not story.at(8700.0, deadline=90_000.0).state.pace.is_late


def test_a_lack_of_on_demand_instances_is_announced():
    story = Due(replace(STARVED, on_demand=None, fastest=None, why_not="no quota"))
    story.at(5000.0)
    assert story.told() == [("no on-demand instances can be had for the deadline: no quota", False)]
    assert story.firm == 0


def test_the_jobs_budget_is_no_smaller_than_what_on_demand_costs_to_the_end():
    # An hour of two instances at $4, and the 190 s for which it keeps money to save its state.
    assert Due(FED).at(7000.0, usd_left=8.5).firm == 2
    story = Due(FED).at(7000.0, usd_left=8.4)
    assert story.firm == 0
    text = "$8.40 of its budget do not pay for the steps left and for saving its state ($8.42)"
    assert text in story.why
    assert not story.state.pace.is_committed


def test_a_budget_that_once_paid_for_on_demand_keeps_enough_for_it():
    # Steps, the change to them and saving the state take 4,050 s at $8 an hour.
    story = Due(FED).at(100.0, usd_left=9.1)
    assert story.state.target == {A: 2}
    assert story.at(200.0, usd_left=8.9).state.target == {FIRM: 2}
    assert story.state.pace.is_committed
    book = PaceRecord("j", is_paid_for=True)
    later = Due(FED, books=CapacityRecord(pace=book)).at(200.0, usd_left=8.9)
    assert later.state.target == {FIRM: 2}, "a new leader keeps it, too"
    poor = Due(FED).at(100.0, usd_left=8.9)
    assert poor.state.target == {A: 2}, "it never paid for on demand, so spot is all that there is"


def test_spot_instances_that_are_no_cheaper_are_not_used():
    dear = Choice({A: 2}, 10.0, 8.0)
    story = Due(replace(FED, spot_now=dear)).at(100.0)
    assert "waits for spot instances" in story.why
    assert story.at(5600.0).firm == 2


DEAR = replace(STARVED, is_spot_dear=True)


def test_dear_spot_instances_are_not_wanted_and_the_reason_is_told():
    story = Due(DEAR).at(100.0)
    assert story.state.target == {}
    assert story.told() == [("waits for cheaper spot instances; 114 min to spare", False)]
    story.at(5600.0, step=90)
    assert story.state.target == {FIRM: 2}
    assert "until cheaper spot instances arrive" in story.why
    story.options(FED).at(5700.0, step=95)
    assert "spot instances suffice" in story.why


def test_a_job_trains_on_where_spot_instances_became_dear_until_on_demand_replaces_them():
    story = Due(FED)
    story.see(10.0, instance(1), instance(2), instance(3))
    agents = {f"n{number}": model.Agent(4) for number in (1, 2, 3)}
    story.hear(model.AgentsCounted(20.0, agents, frozenset({"n1", "n2"})))
    story.at(30.0).options(DEAR).at(40.0, is_running=True)
    assert story.state.target == {A: 2}, "what it does not use is given back"
    agents["n1"] = model.Agent(4, is_leaving=True)
    story.hear(model.AgentsCounted(50.0, agents, frozenset({"n1", "n2"})))
    assert story.at(60.0, is_running=True).asks() == [], "one that leaves is not replaced"
    assert story.at(7400.0, step=90, is_running=True).state.target == {FIRM: 2}


@pytest.mark.parametrize(("usd_left", "pauses"), [(0.5, False), (0.4, True)])
def test_a_job_is_paused_while_its_budget_pays_for_saving_its_state(usd_left, pauses):
    # $8 an hour for 180 s and one observation of 10 s.
    story = Due(FED).at(100.0, step=10, is_running=True, usd_left=usd_left, usd_per_hour=8.0)
    assert bool(story.of(PauseJob)) is pauses
    story.at(101.0, step=10, is_running=True, usd_left=usd_left, usd_per_hour=8.0)
    assert story.of(PauseJob) == [], "once"
    story.hear(model.ProgressSeen(102.0, None))
    story.at(103.0, step=10, is_running=True, usd_left=usd_left, usd_per_hour=8.0)
    assert bool(story.of(PauseJob)) is pauses, "again, if it was resumed all the same"


def test_a_new_leader_goes_on_from_the_stored_pace():
    books = CapacityRecord(pace=PaceRecord("j", 3, is_committed=True))
    story = Due(FED, books=books).at(100.0, step=10)
    assert story.state.target == {FIRM: 2}
    assert story.state.pace.spot_periods == 3
    other = Due(FED, books=replace(books, pace=PaceRecord("k", 3, is_committed=True)))
    assert other.at(100.0, step=10).state.target == {A: 2}, "that was another job"


def test_a_restored_pace_is_trusted_until_the_planner_answers():
    """Otherwise each election would announce a risk."""
    story = Story(books=CapacityRecord(pace=PaceRecord("j", 3, is_committed=False)))
    assert watches_deadline(story.state, "j")
    assert not watches_deadline(story.state, "k")
    assert not watches_deadline(Story().state, "j"), "nothing is known of it"


def test_capacity_watches_only_deadlines_for_which_it_rents():
    assert watches_deadline(Due(FED).at(7000.0).state, "j")
    assert not watches_deadline(Due(replace(STARVED, on_demand=None)).at(5000.0).state, "j")
    assert not watches_deadline(Due(FED).at(7000.0, usd_left=7.9).state, "j"), "too dear"
    stopped = replace(Due(FED).at(7000.0).state, stop="parting")
    assert not watches_deadline(stopped, "j"), "the total budget is spent"
    spot_only, _ = decide(Due(FED).at(7000.0).state, model.TargetSet(7001.0, {}))
    assert not watches_deadline(spot_only, "j"), "there is one contract only"


def test_a_job_is_not_judged_by_what_another_one_could_run_on():
    """It would be bound to on-demand instances for good, by the other job's slow steps."""
    slow = replace(ALONE, step_s=1000.0)
    story = Due(replace(STARVED, job="earlier", on_demand=slow, fastest=slow))
    story.at(1.0)
    assert (story.state.target, story.state.pace) == ({A: 0}, None)
    story.options(FED).at(2.0)
    assert not story.state.pace.is_committed


def test_arrivals_of_spot_instances_are_counted():
    story = Due(FED).at(0.0).at(60.0)
    assert story.state.pace.spot_periods == 1
    story.options(STARVED).at(120.0).options(FED).at(180.0)
    assert story.state.pace.spot_periods == 2
    none = Due(replace(FED, on_demand=None, fastest=None, why_not="no quota")).at(0.0)
    assert none.state.pace.spot_periods == 1, "although there is nothing to choose from"


def test_the_share_of_time_with_spot_instances_is_counted_and_survives_an_election():
    story = Due(FED).at(0.0).at(HOUR).options(STARVED).at(2 * HOUR)
    assert story.state.pace.spot_s == HOUR
    left = work_left(story.state, replace(JOB, step=60, slower=2.0))
    # An hour of two with spot instances, and the prior of one in two hours.
    assert left == WorkLeft(300, 0.5 * HOUR, 0.5)
    story.options(FED).at(2 * HOUR).at(2 * HOUR + 400.0)
    pace = pace_record(story.state.pace)
    assert pace.spot_s == HOUR + 300.0, "in steps, so that the record seldom changes"
    later = Due(FED, books=CapacityRecord(pace=pace)).at(3 * HOUR).at(3 * HOUR + 10.0)
    assert later.state.pace.spot_s == pace.spot_s + 10.0


def test_the_time_in_which_a_job_is_held_is_no_time_with_spot_instances():
    story = Due(FED).at(0.0).at(100.0)
    story.hear(model.ProgressSeen(110.0, None)).at(2 * HOUR).at(2 * HOUR + 10.0)
    assert story.state.pace.spot_s == 110.0


def test_progress_of_a_continued_job_counts_from_its_starting_checkpoint():
    job = JobRecord(JobId("j"), "running", submitted_at=0.0, steps=3600, begun=3300)
    seen = progress_of(state(job=replace(job, deadline=3 * HOUR), step=3300))
    assert (seen.step, seen.steps) == (0, 300)


def test_instances_that_are_up_need_no_boot():
    books = CapacityRecord(
        pace=PaceRecord("j", is_committed=True), boots=(BootRecord(FIRM, has_joined=True),)
    )
    story = Due(FED, books=books).at(1.0)
    assert story.asks() == [(FIRM, 2)]
    assert story.state.pace.slack_s == pytest.approx(3 * HOUR - 1.0 - HOUR - 260.0)
    story.at(61.0)
    assert story.state.pace.slack_s == pytest.approx(3 * HOUR - 1.0 - HOUR - 260.0), "it boots"
    story.see(70.0, instance(1, FIRM), instance(2, FIRM))
    agents = {"n1": model.Agent(4), "n2": model.Agent(4)}
    story.hear(model.AgentsCounted(80.0, agents, frozenset(agents)))
    story.at(90.0, starting_since=85.0)
    assert story.state.pace.slack_s == pytest.approx(3 * HOUR - 90.0 - HOUR - 75.0)
    story.at(100.0, is_running=True)
    assert story.state.pace.slack_s == pytest.approx(3 * HOUR - 100.0 - HOUR)
