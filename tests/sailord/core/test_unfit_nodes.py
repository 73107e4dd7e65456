"""Nodes that cannot run the job, or not yet, and what is told of failures that all share."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import PREPARING
from sailord.core.model.events import Reported
from sailord.core.model.options import Options
from sailord.core.model.phases import Running, Waiting
from sailord.core.model.state import State
from sailord.core.queries.replan_triggers import Trigger, replan_trigger
from sailord.core.queries.unprepared_nodes import why_unprepared
from tests.sailord.core.states import BEGAN, NOW, A, B, C, act, active_of, node, report, state


def unprepared(*since: float | None) -> State:
    """A job before its first plan, on nodes that can run it since then, or are being prepared."""
    nodes = [
        node(
            id_, report(id_, "idle", of=0, unfit="" if at else PREPARING), since=0.0, returned_at=at
        )
        for id_, at in zip((A, B, C), since, strict=True)
    ]
    waiting = state(Waiting("submitted", NOW - 100), *nodes)
    return replace(waiting, active=replace(active_of(waiting), generation=None))


def test_the_first_plan_waits_for_nodes_that_are_being_prepared_but_not_for_ever() -> None:
    long_ago = NOW - 50
    assert trigger_of(unprepared(long_ago, long_ago, long_ago)).due < NOW
    assert trigger_of(unprepared(long_ago, long_ago, None)).due > NOW
    limit_s = Options().start_s + Options().start_gather_s
    assert trigger_of(unprepared(NOW - limit_s, long_ago, None)).due <= NOW
    assert trigger_of(unprepared(NOW, long_ago, long_ago)).due == NOW + Options().start_gather_s


def trigger_of(before: State) -> Trigger:
    trigger = replan_trigger(before, active_of(before))
    assert trigger is not None
    return trigger


def test_a_node_counts_as_ready_from_when_it_can_run_the_job() -> None:
    before = state(Running(BEGAN), node(A, report(A, unfit=PREPARING)), node(B))
    after, _ = act(before, Reported(NOW, report(A, number=7)))
    assert after.nodes[A].free_since == NOW


def test_what_all_ranks_raise_alike_is_reported_once() -> None:
    raised = "ValueError: bad (train.py:20 in loss)"
    nodes = [
        node(
            id_, report(id_, "failed", failure=f"rank {rank}: {raised}", step=20), failed_since=NOW
        )
        for rank, id_ in enumerate((A, B))
    ]
    trigger = trigger_of(state(Running(BEGAN), *nodes, step=20))
    assert trigger.reason == f"machine-a failed: rank 0: {raised}"
    bad_sample = (
        "OSError: gone (data.py:7 in __getitem__, in dataset: sample {0} (step 20, position {0}))"
    )
    of_samples = [
        replace(
            each,
            report=report(each.record.id, "failed", failure=f"rank {n}: {bad_sample.format(n)}"),
        )
        for n, each in enumerate(nodes)
    ]
    trigger = trigger_of(state(Running(BEGAN), *of_samples, step=20))
    assert trigger.reason == f"machine-a failed: rank 0: {bad_sample.format(0)}"
    other = replace(nodes[1], report=report(B, "failed", failure="rank 1: KeyError: 1", step=20))
    trigger = trigger_of(state(Running(BEGAN), nodes[0], other, step=20))
    assert (
        trigger.reason
        == f"machine-a failed: rank 0: {raised}; machine-b failed: rank 1: KeyError: 1"
    )


def test_a_job_is_held_after_a_second_attempt_however_long_the_first_took() -> None:
    """A setup that fails after minutes is tried again before the job is held."""
    failure, limit_s = "setup `make` exited with 1: no", Options().unprepared_s

    def told(now: float, before: State, unfit: str, number: int) -> State:
        return act(before, Reported(now, report(A, "idle", unfit=unfit, number=number)))[0]

    def why(now: float, of: State) -> str:
        return why_unprepared(replace(of, now=now), active_of(of), NOW - 10 * limit_s)

    waiting = state(Waiting("submitted", NOW - 10 * limit_s), node(A, since=0.0))
    waiting = replace(waiting, active=replace(active_of(waiting), generation=None))
    preparing = told(NOW, waiting, PREPARING, 7)
    failed = told(NOW + 1, preparing, failure, 8)
    assert not why(NOW + 2, failed), "it may be tried again"
    again = told(NOW + 61, failed, PREPARING, 9)
    assert not why(NOW + 2 * limit_s, again), "the second attempt is under way"
    assert failure in why(NOW + 2 * limit_s, told(NOW + 2 * limit_s, again, failure, 10))
    assert failure in why(NOW + 1 + limit_s, failed), "of one that fails at once, too"
    assert told(NOW + 62, again, "", 10).nodes[A].unfit_since is None
