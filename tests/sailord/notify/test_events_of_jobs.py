"""Events of several jobs: each has the generation and the step of its own, or none."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import NodeId
from sailord.core.model.phases import Running
from sailord.core.model.state import State
from sailord.core.model.stragglers import NodeSpeeds, Straggler
from sailord.core.sharing.parts import Parts, parts_then_and_now, whole
from sailord.notify.outbox import committed_id, job_stopped
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    A,
    B,
    C,
    changed,
    durable,
    generation,
    job,
    node,
    order,
    report,
    state,
)
from tests.sailord.notify.test_announcer import OTHER, RUNS, Published


def test_events_of_a_job_that_does_not_run_have_no_step_of_the_one_that_does() -> None:
    published = Published()
    waits = RUNS.with_job(replace(job(), id=OTHER, state="paused"))
    published.announcer.tell_order(order("resume", OTHER), waits)
    published.announcer.tell_order(order("checkpoint"), waits)
    told = [(each.job, each.generation, each.step) for each in published.announcer.feed.kept]
    assert told == [(OTHER, None, None), (JOB, 3, 40)]


def test_a_checkpoint_of_a_job_beside_the_first_is_of_its_own_step() -> None:
    published, beside = Published(), replace(generation(C, number=9), job=OTHER)
    second = state(
        Running(BEGAN), node(C), job=job(id=OTHER, part=(C,)), generation=beside, step=120
    )
    before = Parts(RUNS, {OTHER: second})
    after = before.with_part(OTHER, replace(second, durables={OTHER: durable(100)}))
    changes = parts_then_and_now(before, after)
    published.announcer.observe(whole(before), whole(after), changes)
    (told,) = published.announcer.feed.kept
    assert (told.text, told.job, told.generation, told.step) == (
        "step 100 is durable", OTHER, 9, 120,
    )  # fmt: skip


def test_a_lost_node_is_told_at_the_step_of_its_own_job() -> None:
    published, beside = Published(), replace(generation(C, number=9), job=OTHER)
    second = state(
        Running(BEGAN), node(C), job=job(id=OTHER, part=(C,)), generation=beside, step=120
    )
    before = Parts(RUNS, {OTHER: second})
    lost = second.nodes.with_({C: changed(second.nodes[C], lost_at=NOW, why_lost="gone")})
    after = before.with_part(OTHER, replace(second, nodes=lost))
    changes = parts_then_and_now(before, after)
    published.announcer.observe(whole(before), whole(after), changes)
    (told,) = [each for each in published.announcer.feed.kept if each.kind == "node_lost"]
    assert (told.node, told.generation, told.step) == ("machine-c", 9, 120)


def test_a_new_leader_repeats_no_checkpoint_of_a_job_that_ended_long_ago() -> None:
    ended = replace(job(), id=OTHER, state="done", reason="all 9 steps are done")
    known = replace(RUNS.with_job(ended), durables={JOB: durable(30), OTHER: durable(9)})
    stopped = job_stopped(ended, NOW, 7)
    assert stopped is not None
    for reported in ((), stopped[:1]):  # The last leader may have died just after the end.
        published = Published().announcer
        published.outbox.at_of = dict.fromkeys(reported, NOW)
        published.observe(State(), known)
        told = published.outbox.at_of
        assert committed_id(JOB, durable(30)) in told
        assert (committed_id(OTHER, durable(9)) in told) == bool(reported)


# ---- a slow node that recovers ------------------------------------------------------------------

CRAWLS = Straggler(2.0, "it did before", NOW - 300, 10, 40, delay_s=15.0)
CRAWLED = state(None, speeds=NodeSpeeds(3, slow={B: CRAWLS}))


def looked(
    crawled: State = CRAWLED, recovered: frozenset[NodeId] = frozenset({B})
) -> list[tuple[str, str | None]]:
    """What is told once the speeds are compared again."""
    published = Published()
    speeds = NodeSpeeds(3, looked_at=NOW, recovered=recovered)
    after = replace(state(None, speeds=speeds), now=NOW)
    published.announcer.observe(crawled, after)
    return [(each.text, each.node) for each in published.announcer.feed.kept]


def test_a_slow_node_that_recovers_is_an_event_with_what_it_cost() -> None:
    told = "machine-b is no longer slow, after 5 min that cost about 15.0 s of 2 GPUs"
    assert looked() == [(told, "machine-b")]
    beside = state(None, speeds=NodeSpeeds(3, slow={B: replace(CRAWLS, delay_s=0.0)}))
    assert looked(beside) == [("machine-b is no longer slow, after 5 min", "machine-b")]
    assert looked(recovered=frozenset()) == [], "it was not measured, or all are as slow"


def test_a_node_that_does_not_train_or_was_not_called_slow_does_not_recover() -> None:
    short = replace(CRAWLS, since=NOW - 1)
    assert looked(state(None, speeds=NodeSpeeds(3, slow={B: short}))) == []
    published = Published()
    stops = state(
        None, node(A), node(B, report(B, "stopped")), speeds=NodeSpeeds(3, recovered=frozenset({B}))
    )
    published.announcer.observe(CRAWLED, stops)
    assert not published.announcer.feed.kept
    still = state(None, speeds=NodeSpeeds(3, slow={B: CRAWLS}, looked_at=NOW))
    published.announcer.observe(CRAWLED, still)
    assert not published.announcer.feed.kept
