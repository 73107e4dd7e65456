"""A plan is found for live nodes, from nothing and from a running plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from planner.move_policy.node_lifetimes import LifetimeHistory
from planner.replan.past_moves import PastMove
from planner.replan.replanner import Replanner
from sailord.planning.machine_lifetimes import pool_of
from sailord.planning.messages import FoundPlan, MoveContext, Unpaid
from sailord.planning.plan_search import (
    HURRIED,
    answer,
    precompute_next,
    start_precomputing,
)
from sailord.planning.precomputed import NoPlan, PrecomputedPlans
from simulator.documents.files import parse_document
from simulator.inputs.plan_file import plan_from_document
from tests.sailord.planning.requests import (
    CHUNKED,
    CHUNKED_SPEC,
    LARGE,
    NODES,
    QUESTION,
    ROOT,
    SPEC,
    node,
)
from worker.layout.rank_layout import rank_places


def test_plan_uses_only_requested_nodes():
    found = answer(QUESTION)
    assert isinstance(found, FoundPlan)
    assert set(found.proposal.members) <= {record.id for record in NODES}
    assert (found.about["tokens_per_iteration"], found.about["unit"]) == (16 * 64, "tokens")
    estimate, plan = found.about["estimate"], json.loads(found.plan)
    stages = [(p, s) for p, pipeline in enumerate(plan["pipelines"]) for s in pipeline["stages"]]
    assert len(found.proposal.peaks) == sum(stage["tp"] for _, stage in stages)
    most = max(peak for stages in estimate["peak_memory_bytes"] for peak in stages)
    assert max(peak.tensors + peak.context for peak in found.proposal.peaks) == most


def test_answer_tells_whether_dollars_are_in_the_way():
    poor = replace(QUESTION, spec=SPEC + "\n[objective]\nmax_usd_per_hour = 0.0001\n")
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    for asked in (poor, replace(poor, running=first.plan, ran_on=NODES)):
        found = answer(asked)
        assert isinstance(found, Unpaid)
        assert "objective.max_usd_per_hour" in found
    hasty = replace(QUESTION, spec=SPEC + "\n[objective]\nmin_iterations_per_s = 1e6\n")
    found = answer(hasty)
    assert isinstance(found, str)
    assert not isinstance(found, Unpaid)


def limits_told(found: object) -> list[str]:
    assert isinstance(found, FoundPlan)
    return [why for why in found.about["why"] if "would break max_usd_per_hour" in why]


def test_plan_says_that_a_limit_keeps_idle_nodes_out():
    free = answer(QUESTION)
    assert isinstance(free, FoundPlan)
    assert limits_told(free) == []
    usd = free.proposal.usd_per_hour
    assert usd is not None
    for most, count in ((1.1 * usd, 1), (99 * usd, 0)):
        spec = SPEC + f"\n[objective]\nmax_usd_per_hour = {most}\n"
        limited = replace(QUESTION, spec=spec)
        found = answer(limited)
        assert len(limits_told(found)) == count
        assert isinstance(found, FoundPlan)
        after = answer(replace(limited, running=found.plan, ran_on=NODES))
        assert limits_told(after) == limits_told(found)
    (why,) = limits_told(answer(replace(limited, spec=spec.replace(str(99 * usd), str(1.1 * usd)))))
    assert re.fullmatch(
        r"idle: 2 nodes; the plan costs \$3\.67 an hour, and one more GPU there "
        r"\(\$[\d.]+ or more\) would break max_usd_per_hour = 4\.04\d*",
        why,
    )


def test_replan_leaves_out_the_lost_node():
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    left = tuple(record for record in NODES if record.id not in first.proposal.members)
    second = answer(replace(QUESTION, nodes=left, running=first.plan, ran_on=NODES))
    assert isinstance(second, FoundPlan)
    assert set(second.proposal.members) <= {record.id for record in left}
    assert second.proposal.is_worth_it
    assert second.proposal.move_s > 0
    assert [name for name, _ in second.proposal.move_phases] == [
        *("detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step"),
    ]
    # The total also counts the repeated steps, but not the first one of the new plan.
    move = second.about["move"]
    downtime_s = sum(seconds for _, seconds in second.proposal.move_phases) - move["trained_s"]
    assert second.proposal.move_s >= downtime_s > 0


def test_a_move_away_from_nodes_that_go_on_is_predicted_as_a_planned_one():
    """The state comes from them, too."""
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    gone = first.proposal.members
    left = tuple(record for record in NODES if record.id not in gone)
    lost = replace(QUESTION, nodes=left, running=first.plan, ran_on=NODES)
    drained = replace(lost, leaving=gone)
    after_loss, after_drain = answer(lost), answer(drained)
    assert isinstance(after_loss, FoundPlan)
    assert isinstance(after_drain, FoundPlan)
    assert after_drain.plan == after_loss.plan
    moves = [found.about["move"] for found in (after_loss, after_drain)]
    assert [move["phases"]["detect_s"] > 0 for move in moves] == [True, False]
    assert [move["steps_lost"] > 0 for move in moves] == [True, False]
    one_left = answer(replace(lost, leaving=gone[1:]))
    assert isinstance(one_left, FoundPlan)
    assert one_left.about["move"]["steps_lost"] > 0
    ahead = PrecomputedPlans(replace(lost, nodes=NODES))
    ahead.add(frozenset(gone), frozenset(record.id for record in NODES), after_loss)
    assert ahead.answer(lost) is not None
    assert ahead.answer(drained) is None, "it was predicted as after a loss"


def test_the_next_move_counts_what_a_new_node_fetches():
    """The job must leave an announced node in time, and a restart in place fetches nothing."""
    wide = replace(QUESTION, spec=QUESTION.spec.replace("hidden = 64", "hidden = 6144"))
    first = answer(wide)
    assert isinstance(first, FoundPlan)
    assert first.proposal.next_move_s is not None
    assert first.proposal.next_move_s > first.about["again"]["seconds"] + 10


def test_measured_moves_correct_predictions_also_of_plans_computed_before_them():
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    left = tuple(record for record in NODES if record.id not in first.proposal.members)
    question = replace(QUESTION, nodes=left, running=first.plan, ran_on=NODES)
    plain = answer(question)
    assert isinstance(plain, FoundPlan)
    assert plain.proposal.move_uncorrected == plain.proposal.move_phases
    predicted = plain.proposal.move_phases
    half = PastMove(False, predicted, tuple((name, seconds / 2) for name, seconds in predicted))
    later = replace(question, past=MoveContext(moves=(half,)))
    found = answer(later)
    assert isinstance(found, FoundPlan)
    phases = dict(found.proposal.move_phases)
    assert phases["fetch"] == pytest.approx(dict(predicted)["fetch"] / 2)
    assert found.proposal.move_uncorrected == predicted
    lost = frozenset(first.proposal.members)
    ahead = PrecomputedPlans(replace(question, nodes=NODES))
    ahead.add(lost, frozenset(record.id for record in NODES), plain)
    early = ahead.answer(later)
    assert early is not None
    assert early.proposal.move_phases == found.proposal.move_phases
    assert early.proposal.move_s == pytest.approx(found.proposal.move_s, rel=0.1)
    assert early.about["move"]["phases"] == found.about["move"]["phases"]
    assert ahead.answer(question) == plain


def test_a_restart_is_predicted_with_the_moves_of_its_own_request():
    slow = PastMove(False, (("verify", 1.0),), (("verify", 3.0),))
    questions = QUESTION, replace(QUESTION, past=MoveContext(moves=(slow,))), QUESTION
    answers = [answer(question) for question in questions]
    verify_s = [found.about["again"]["phases"]["verify_s"] for found in answers]
    assert verify_s[1] > verify_s[0] == verify_s[2]


def test_a_proposal_says_how_often_its_nodes_are_lost_and_how_long_a_checkpoint_takes():
    calm = answer(QUESTION)
    assert isinstance(calm, FoundPlan)
    assert (calm.proposal.losses, calm.proposal.observed_s) == (0.0, 0.0)
    assert calm.proposal.write_s == calm.about["write_s"] > 0
    history = LifetimeHistory()
    for hour in range(4):
        pool = pool_of(NODES[0])
        history = history.seen(3600.0 * hour, up={pool: len(NODES)}, lost={pool: hour > 0})
    stormy = answer(replace(QUESTION, past=MoveContext(now_s=3 * 3600.0, history=history)))
    assert isinstance(stormy, FoundPlan)
    assert 0 < stormy.proposal.losses < 3, "some of the three did not hit the plan's nodes"
    assert 0 < stormy.proposal.observed_s < 3 * 3600


WIDE = replace(QUESTION, spec=QUESTION.spec.replace("hidden = 64", "hidden = 2048"))
"""Its layers take longer than their launches."""


def test_a_proposal_says_what_gpus_are_worth_also_those_that_the_job_does_not_have():
    found = answer(WIDE)
    assert isinstance(found, FoundPlan)
    worths = dict(found.proposal.worths)
    assert worths.keys() == {"A100-40", "V100-16"}
    assert 0 < min(worths.values()) < max(worths.values()) == 1


def test_gpus_are_worth_the_same_in_whatever_part_the_job_is_asked_about():
    """Kinds that the cluster file does not name, too: else nodes would go to and fro for ever."""
    kinds = "L4", "T4"
    worths = []
    for kind in kinds:
        nodes = tuple(replace(each, gpu=kind, machine=f"{kind}x2") for each in NODES)
        found = answer(replace(WIDE, nodes=nodes, kinds=kinds))
        assert isinstance(found, FoundPlan)
        worths.append(dict(found.proposal.worths))
    assert worths[0] == worths[1]
    assert worths[0].keys() == {"A100-40", "V100-16", *kinds}


def test_unknown_machines_are_reconstructed_from_the_running_plan():
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    gone = min(first.proposal.members)
    left = tuple(record for record in NODES if record.id != gone)
    told = answer(replace(QUESTION, nodes=left, running=first.plan, ran_on=NODES))
    untold = answer(replace(QUESTION, nodes=left, running=first.plan, ran_on=left))
    assert isinstance(told, FoundPlan)
    assert isinstance(untold, FoundPlan)
    assert "lost devices" in untold.proposal.why
    assert untold.proposal == told.proposal


def test_urgent_request_skips_the_improvement_search(monkeypatch):
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    monkeypatch.setattr(Replanner, "improve", lambda *_: pytest.fail("it searched"))
    again = answer(replace(QUESTION, running=first.plan, ran_on=NODES, is_urgent=True))
    assert isinstance(again, FoundPlan)


def test_unchanged_cluster_keeps_the_running_plan():
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    again = answer(replace(QUESTION, running=first.plan, ran_on=NODES))
    assert isinstance(again, FoundPlan)
    assert not again.proposal.is_worth_it or again.proposal.plan == first.proposal.plan


@pytest.mark.slow
def test_a_job_behind_its_deadline_is_planned_for_speed():
    """Nodes that cost most of the money are left out by goal cost, and used in haste."""
    spec = (ROOT / "examples" / "opt-350m.toml").read_text(encoding="utf-8")
    cheap = spec.replace('goal = "throughput"', 'goal = "cost"')
    nodes = (node("a", gpus=4), node("b", gpus=4))
    first = answer(replace(QUESTION, spec=cheap, nodes=nodes[:1]))
    assert isinstance(first, FoundPlan)
    grown = replace(QUESTION, spec=cheap, nodes=nodes, running=first.plan, ran_on=nodes[:1])
    found, hasty = answer(grown), answer(replace(grown, keeps_deadline=True))
    assert isinstance(found, FoundPlan)
    assert isinstance(hasty, FoundPlan)
    assert hasty.proposal.iteration_s < found.proposal.iteration_s
    assert hasty.proposal.is_worth_it
    ahead = PrecomputedPlans(grown)
    ahead.add(frozenset(), frozenset(), found)
    assert ahead.answer(grown) is not None
    assert ahead.answer(replace(grown, keeps_deadline=True)) is None
    assert ahead.answer(replace(grown, usd_max=9.0)) is None, "another budget was given since"


@pytest.mark.slow
def test_new_node_of_a_stormy_pool_is_used_once_waiting_has_cost_enough():
    """Its uptime and the losses of its pool decide on a voluntary reconfiguration."""
    spec = (ROOT / "examples" / "opt-350m.toml").read_text(encoding="utf-8")
    nodes = tuple(node(name, gpus=4) for name in "ab")
    question = replace(QUESTION, spec=spec, nodes=nodes[:1])
    first = answer(question)
    assert isinstance(first, FoundPlan)
    grown = replace(question, nodes=nodes, running=first.plan, ran_on=nodes[:1])

    def judged(past):
        found = answer(replace(grown, past=past))
        assert isinstance(found, FoundPlan)
        return found.proposal

    young = MoveContext(age_s=tuple((record.id, 2.0) for record in nodes), now_s=60.0)
    assert judged(young).is_worth_it
    assert not judged(replace(young, left_s=0.01)).is_worth_it, "the job is nearly done"
    pool = pool_of(nodes[0])
    stormy = LifetimeHistory().seen(0.0, up={pool: 3}, lost={})
    for second in range(1, 60):
        stormy = stormy.seen(float(second), up={pool: 3}, lost={pool: 30})
    waits = judged(replace(young, history=stormy))
    assert not waits.is_worth_it
    later_s = 2.0 + waits.ask_again_s
    old = replace(young, age_s=tuple((record.id, later_s) for record in nodes), history=stormy)
    assert judged(old).is_worth_it
    # As if it had been up forever, but the job has just moved.
    assert not judged(replace(old, age_s=(), last_move_s=59.0)).is_worth_it


def test_urgent_answer_is_followed_by_the_whole_search():
    """The first good plan after a loss may leave nodes unused that a slower search would use."""
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    gone = min(first.proposal.members)
    left = tuple(record for record in NODES if record.id != gone)
    past = MoveContext(settle_s=25.0)
    lost = replace(QUESTION, nodes=left, running=first.plan, ran_on=NODES, past=past)
    for question in (lost, replace(lost, is_urgent=True)):
        hurried = answer(question)
        assert isinstance(hurried, FoundPlan)
        assert hurried.proposal.ask_again_s == 25.0
        assert HURRIED in hurried.about["why"]
    calm = answer(replace(lost, running=hurried.plan, ran_on=left))
    assert isinstance(calm, FoundPlan)
    assert calm.proposal.ask_again_s is None


def test_precomputed_answers_are_followed_by_the_whole_search():
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    start_precomputing(replace(QUESTION, running=first.plan, ran_on=NODES))
    step = precompute_next()
    assert step is not None
    assert isinstance(step[2], FoundPlan)
    assert step[2].proposal.ask_again_s == MoveContext().settle_s


def test_job_that_allows_it_gets_chunks_and_keeps_them_after_a_loss():
    """Memory and compute times are by rank, however many chunks it has."""
    first = answer(CHUNKED)
    assert isinstance(first, FoundPlan)
    lost = min(first.proposal.members)
    left = tuple(record for record in LARGE if record.id != lost)
    second = answer(replace(CHUNKED, nodes=left, running=first.plan, ran_on=LARGE))
    assert isinstance(second, FoundPlan)
    assert set(second.proposal.members) == {record.id for record in left}
    assert "1 of 1 pipelines lost devices" in second.proposal.why
    for found in (first, second):
        plan = plan_from_document(parse_document(found.plan, name="plan"))
        assert (plan.virtual_stages, len(plan.pipelines[0].stages)) == (2, 8)
        ranks = rank_places(plan)
        assert (len(found.proposal.peaks), len(found.proposal.busy.seconds)) == (len(ranks),) * 2
    plain = answer(replace(CHUNKED, spec=CHUNKED_SPEC.partition("[objective]")[0]))
    assert isinstance(plain, FoundPlan)
    assert b"interleaved" not in plain.plan


def test_a_loss_that_leaves_no_plan_is_precomputed_as_such():
    """The job trains on its only node."""
    alone = replace(QUESTION, nodes=NODES[:1])
    first = answer(alone)
    assert isinstance(first, FoundPlan)
    running = replace(alone, running=first.plan, ran_on=NODES[:1])
    start_precomputing(running)
    lost, used, why = precompute_next() or (None, frozenset(), None)
    assert lost == used == {NODES[0].id}
    assert why == "cluster: no node is up that may be used; wait for a node, or add one"
    ahead = PrecomputedPlans(running)
    ahead.add(lost, used, why)
    assert ahead.following == {lost: NoPlan(why)}
    assert ahead.answer(replace(running, nodes=())) is None, "the planner is asked again"
