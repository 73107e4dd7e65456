"""Single decisions about stragglers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents.protocol.records import ComputeTimes, NodeId, Order
from sailord.core.decide import decide
from sailord.core.model.commands import GiveOrder, Note, RequestPlan, WriteGeneration
from sailord.core.model.events import OrderGiven, PlanFound, PlanRefused, Ticked
from sailord.core.model.options import Options
from sailord.core.model.phases import Held, Running, Stopping, Waiting
from sailord.core.model.state import KeptStraggler, State
from sailord.core.model.stragglers import NodeSpeeds, Straggler
from sailord.core.queries.straggler_queries import straggler_texts
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    A,
    B,
    C,
    D,
    Planning,
    act,
    active_of,
    changed,
    generation,
    grouped,
    node,
    phase,
    proposal,
    report,
    state,
)

ALL = (A, B, C, D)
OPTIONS = Options(slow_steps=10, slow_s=60.0)
CRAWLS = Straggler(3.0, "others with the same work", NOW - 60, 30, 40)
SAID = (
    "machine-b is slow: it computes 3.0 times as long as others with the same work, since step 30"
)
QUESTION = Planning(1, (A, C, D), SAID, False, NOW + 60, slow={B: CRAWLS})
MARK = Order("slow-b-job-3", "quarantine", B, None, str(CRAWLS))
G = generation(*ALL, busy=ComputeTimes((0.1,) * 4))


def four(*found: NodeId, **others: Any) -> State:
    """A job on four nodes, some of which have been slow for long enough, as was seen just now."""
    slow = dict.fromkeys(found, CRAWLS)
    watch = NodeSpeeds(3, 10, NOW + 1000, {"A100-40": 1.0}, {}, slow)
    others = {"considered": frozenset(ALL), "generation": G, "speeds": watch, **others}
    made = state(None, *map(node, ALL), **others)
    return replace(made, options=OPTIONS)


def asked(answer: Any = None) -> State:
    """The planner was asked what is best without the slow one."""
    made = four(B)
    active = replace(QUESTION, answer=answer).put(active_of(made))
    return replace(made, active=active, requests=1)


def measured(times_b: float, step: int) -> State:
    """What the nodes report, all with the same work."""
    busy = {id_: 0.1 * (times_b if id_ == B else 1.0) for id_ in ALL}
    nodes = [
        node(id_, report(id_, step=step, busy=((rank, busy[id_]),))) for rank, id_ in enumerate(ALL)
    ]
    return replace(
        state(Running(BEGAN), *nodes, considered=frozenset(ALL), generation=G, step=step),
        options=OPTIONS,
    )


def test_reports_are_compared_with_the_prediction():
    before = measured(3.0, 40)
    after, _ = decide(before, Ticked(NOW))
    assert active_of(after).slowness.speeds == NodeSpeeds(3, 40, NOW), (
        "the first steps are not judged"
    )
    later = measured(3.0, 50)
    later = replace(
        later, active=grouped(active_of(later), speeds=active_of(after).slowness.speeds)
    )
    after, _ = decide(later, Ticked(NOW + 1))
    (slow,) = active_of(after).slowness.speeds.slow.values()
    assert replace(slow, times=round(slow.times, 6)) == replace(
        CRAWLS, since=NOW + 1, since_step=50, step=50
    )
    assert list(active_of(after).slowness.speeds.slow) == [B]


def test_no_prediction_means_no_stragglers():
    before = measured(3.0, 40)
    unpredicted = replace(before, active=replace(active_of(before), generation=generation(*ALL)))
    after, _ = decide(unpredicted, Ticked(NOW))
    assert active_of(after).slowness.speeds == NodeSpeeds()


def test_no_node_is_called_slow_by_what_a_generation_measured_that_no_longer_trains():
    made = four(B)
    assert straggler_texts(made) == {B: (str(CRAWLS), CRAWLS.since)}
    for rests in (Held("its script failed", NOW), Waiting("no plan", NOW)):
        assert straggler_texts(replace(made, active=replace(active_of(made), phase=rests))) == {}
    unpredicted = replace(active_of(made), generation=generation(*ALL, number=4))
    after, _ = decide(replace(made, active=unpredicted), Ticked(NOW))
    assert straggler_texts(after) == {}, "it is never compared"


def test_straggler_question_leaves_the_node_out():
    after, orders = act(four(B), Ticked(NOW))
    assert phase(after) == QUESTION
    times = {B: 3.0}
    factors = {"A100-40": 1.0}
    assert orders == (RequestPlan(1, JOB, (A, C, D), G, times, factors=factors),)


def test_better_plan_without_the_straggler_is_adopted_after_a_stop():
    found = proposal(A, C, D)
    after, orders = act(asked(), PlanFound(NOW, 1, found))
    assert isinstance(phase(after), Stopping)
    assert after.nodes[B].exclusion.slow == str(CRAWLS)
    give, write = (each for each in orders if isinstance(each, GiveOrder | WriteGeneration))
    assert give == GiveOrder(MARK)
    assert isinstance(write, WriteGeneration)
    assert (write.record.state, write.record.stop_at) == ("stopping", 41)
    assert active_of(after).attempts.failures == 0
    assert after.job.past.departures == 0, "no machine went"


def test_straggler_stays_if_no_plan_is_better():
    worse = proposal(A, C, D, is_worth_it=False, why="no plan is better")
    after, orders = decide(asked(), PlanFound(NOW, 1, worse))
    assert phase(after) == Running(BEGAN)
    told = "keeps straggler machine-b: no plan is better"
    assert orders == (Note(told, JOB, is_transition=True),)
    assert active_of(after).slowness.kept == {B: KeptStraggler(NOW + 600, "no plan is better")}
    assert after.nodes[B].exclusion.slow == ""
    again, orders = decide(after, Ticked(NOW + 1))
    assert (phase(again), orders) == (Running(BEGAN), ())
    late = replace(after, now=NOW + 601)
    late = replace(late, active=grouped(active_of(late), advanced_at=NOW + 600))
    again, _ = decide(late, Ticked(NOW + 601))
    assert isinstance(phase(again), Planning), "after a while it is asked anew"


def test_straggler_stays_if_there_is_no_plan_without_it():
    after, _ = act(asked(), PlanRefused(NOW, 1, "it does not fit"))
    assert phase(after) == Running(BEGAN)
    assert active_of(after).slowness.kept[B].why == "there is no plan without it: it does not fit"
    assert not active_of(after).asked.is_refused, "nothing was asked about all nodes"


def test_straggler_stays_if_the_planner_does_not_answer():
    after, _ = act(asked(), Ticked(NOW + 60))
    assert phase(after) == Running(BEGAN)
    assert B in active_of(after).slowness.kept


def test_straggler_stays_if_it_recovered_meanwhile():
    before = asked()
    watch = replace(active_of(before).slowness.speeds, slow={})
    before = replace(before, active=grouped(active_of(before), speeds=watch))
    after, orders = act(before, PlanFound(NOW, 1, proposal(A, C, D)))
    assert (phase(after), orders) == (Running(BEGAN), ())
    assert after.nodes[B].exclusion.slow == ""


def test_share_limit_leaves_out_the_slowest_first():
    before = four(B, C)
    slow = {B: CRAWLS, C: replace(CRAWLS, times=4.0)}
    watch = replace(active_of(before).slowness.speeds, slow=slow)
    before = replace(before, active=grouped(active_of(before), speeds=watch))
    after, orders = decide(before, Ticked(NOW))
    at = phase(after)
    assert isinstance(at, Planning)
    assert at.nodes == (A, B, D)
    assert [o.text for o in orders if isinstance(o, Note) and o.is_transition] == [
        "keeps straggler machine-b: no more than 25% of all nodes are left out"
    ]


def test_marked_stragglers_count_towards_the_share():
    before = four(B)
    nodes = before.nodes.with_({D: changed(before.nodes[D], slow="it crawls")})
    after, _ = act(replace(before, nodes=nodes), Ticked(NOW))
    assert phase(after) == Running(BEGAN)


def test_a_loss_is_handled_before_stragglers():
    before = four(B)
    nodes = before.nodes.with_({D: changed(before.nodes[D], draining_since=NOW - 1)})
    after, _ = act(replace(before, nodes=nodes), Ticked(NOW))
    at = phase(after)
    assert isinstance(at, Planning)
    assert (at.nodes, at.slow, at.is_forced) == ((A, B, C), {}, True)


def test_straggler_mark_holds_until_uncordon():
    after, _ = act(four(), OrderGiven(NOW, MARK))
    assert after.nodes[B].exclusion.slow == str(CRAWLS)
    back = Order("back", "uncordon", "machine-b")
    again, _ = act(after, OrderGiven(NOW, back))
    assert again.nodes[B].exclusion.slow == ""


def test_stragglers_are_taken_back_if_nothing_runs_without_them():
    before = four()
    slow = changed(before.nodes[B], slow="it crawls")
    gone = changed(before.nodes[D], slow="it crawls", draining_since=NOW - 1)
    left = replace(before, nodes=before.nodes.with_({B: slow, D: gone}))
    waits = grouped(active_of(left), phase=Waiting("a loss", NOW - 1), is_refused=True)
    waits = grouped(waits, considered=frozenset((A, C)), considered_at=NOW)
    after, orders = decide(replace(left, active=waits), Ticked(NOW))
    at = phase(after)
    assert isinstance(at, Planning)
    assert at.nodes == (A, B, C), "one that goes away is of no use"
    assert (after.nodes[B].exclusion.slow, after.nodes[D].exclusion.slow) == ("", "it crawls")
    back = Order("slow-back-b-job-3", "uncordon", B, None, "there is no plan without it")
    assert GiveOrder(back) in orders
    assert "uses straggler machine-b again: " in next(o.text for o in orders if isinstance(o, Note))
    still = replace(left, active=grouped(waits, is_refused=False))
    assert act(still, Ticked(NOW))[0].nodes[B].exclusion.slow == "it crawls", (
        "first the others are asked"
    )


def test_straggler_that_must_go_is_planned_around_without_waiting_for_the_answer():
    """The question is about the others, so that none of its nodes is affected."""
    notice = Order("notice", "preempt", B, leaves_at=NOW + 30)
    warned, commands = act(asked(), OrderGiven(NOW + 1, notice))
    assert commands == (), "further notices are gathered"
    after, (request,) = act(warned, Ticked(NOW + 2))
    assert isinstance(request, RequestPlan)
    assert (request.nodes, dict(request.slow)) == ((A, C, D), {})
    at = phase(after)
    assert isinstance(at, Planning)
    assert (at.reason, at.is_forced) == ("machine-b is preempted", True)


def test_new_node_is_asked_about_again_if_the_straggler_stays():
    new = replace(node("e"), report=report("e", "idle", of=0, sealed=()))
    made = state(None, *map(node, ALL), new, considered=frozenset((A, C, D, "e")), generation=G)
    active = replace(QUESTION, nodes=(A, C, D, NodeId("e")), answer=None).put(active_of(made))
    before = replace(made, active=active, requests=1, options=OPTIONS)
    after, commands = act(before, PlanRefused(NOW, 1, "it does not fit"))
    (request,) = (each for each in commands if isinstance(each, RequestPlan))
    assert request.nodes == (*ALL, "e")
    at = phase(after)
    assert isinstance(at, Planning)
    assert at.reason == "machine-e could help"
