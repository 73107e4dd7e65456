"""What ``sailorctl status`` prints in each phase; rewrite with SAILOR_RETELL=1, and read it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agents.protocol.codec import plain
from agents.protocol.records import (
    FIRST,
    Bill,
    Durable,
    GenerationRecord,
    Hang,
    JobId,
    JobPast,
    Point,
)
from sailord.api.answers import render
from sailord.api.answers.last_told import last_told
from sailord.api.answers.problems import FirstSeen, Service, problems_of
from sailord.api.answers.types import LeaderView, Refusals, Status, StoreView, Told
from sailord.controller.step_rate import StepRate
from sailord.core.model.commands import Settled
from sailord.core.model.nodes import Nodes
from sailord.core.model.phases import Held, Opening, Phase, Running, Starting, Stopping, Waiting
from sailord.core.model.state import KeptStraggler, Securing, State
from sailord.core.model.stragglers import NodeSpeeds, Straggler
from sailord.notify.feed import FeedEvent
from sailord.notify.outbox import committed_id
from sailord.text.cluster_text import (
    _job_lines,
    jobs_text,
    status_text,
)
from sailord.text.next_text import name_some
from sailord.text.node_text import nodes_text
from sailord.text.units import timestamp
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    STARTING,
    A,
    B,
    C,
    G,
    Planning,
    changed,
    generation,
    grouped,
    job,
    node,
    proposal,
    report,
    state,
)

HERE = Path(__file__).parent / "status"
PLAN = Path(__file__).resolve().parents[4] / "examples" / "opt-350m-plan.json"
PRICED = replace(G, usd_per_hour=58.752, reason="a node came")
DURABLE = Durable(Point(30, 3), "m", "0" * 64)
ABOUT: Mapping[str, Any] = {
    "estimate": {"iteration_s": 2.0, "cost_usd_per_hour": 58.752},
    "tokens_per_iteration": 2_097_152,
}


SPENT = Bill(usd=12.3, until=NOW - 5)


@dataclass(frozen=True)
class Case:
    """One moment."""

    phase: Phase | None = None
    state: State | None = None
    is_away: bool = False
    has_plan: bool = False
    steps: int | None = None
    bill: Bill = SPENT
    generation: GenerationRecord | None = PRICED
    securing: Securing | None = None
    queue: tuple[str, ...] = ()
    step_s: float | None = None
    feed: tuple[FeedEvent, ...] = ()
    led_since: float | None = None


SAID = report(A, "running", step=40, loss=3.14159, tokens_per_s=900_000.0, stall_s=0.02)
LEAVES = node(B, draining_since=NOW - 1, record=replace(node(B).record, leaves_at=NOW + 25))
ANNOUNCED = replace(LEAVES, record=replace(LEAVES.record, leaves_at=NOW + 2000))

UNFIT = report(A, "idle", sealed=(), unfit="setup `make` exited with 2: no make")
GONE = node(C, report(C, "idle", sealed=()), draining_since=NOW - 60)

LEFT_OUT = node(C, slow="it computes 4.2 times as long as others with the same work")
CONTRADICTED = node(
    C, wrong_bits="its bits were contradicted (piece 2 differs); `sailorctl uncordon c` returns it"
)
CRAWLS = Straggler(1.8, "it did before", NOW - 200, 10, 40)
LIMPING = state().active
assert LIMPING is not None
LIMPS = grouped(
    LIMPING,
    speeds=NodeSpeeds(3, slow={B: CRAWLS}),
    kept={B: KeptStraggler(NOW + 600, "no plan is better")},
)

CASES = {
    "no_job": Case(state=replace(state(), active=None, nodes=Nodes())),
    "waiting": Case(
        Waiting("next in the queue", NOW - 200),
        state=state(None, node(A, is_cordoned=True), node(B, is_cordoned=True)),
        generation=None,
        bill=Bill(),
    ),
    "planning": Case(
        Planning(4, (A, B), "machine-b is draining", True, NOW + 58, before=Running(NOW - 900)),
        state=state(None, node(A, SAID), LEAVES),
    ),
    "drained": Case(
        Running(NOW - 900), state=state(None, node(A, SAID), node(B), GONE), generation=PRICED
    ),
    "left_later": Case(
        Running(NOW - 900),
        state=state(None, node(A, SAID), ANNOUNCED),
        generation=replace(PRICED, next_move_s=90.0),
    ),
    "opening": Case(Opening(PRICED, proposal(A))),
    "starting": Case(Starting(NOW - 3.25, NOW + 117, 4.5)),
    "running": Case(
        Running(NOW - 7300),
        state=state(None, node(A, SAID), node(B), step_s=2.25),
        has_plan=True,
        steps=1000,
        generation=replace(PRICED, persist_every=20),
        queue=("next", "third"),
        step_s=2.25,
        feed=(
            FeedEvent(
                1, NOW - 9000, "reconfigured", "started on 2 nodes from step 0, 8.1 s", job=JOB
            ),
            FeedEvent(2, NOW - 7300, "reconfigured", "c lost → moved to 2 nodes", job=JOB),
            FeedEvent(3, NOW - 60, "order", "cordoning d was ordered (by alice)", job=JOB),
            FeedEvent(4, NOW - 50, "order", "pausing other was ordered", job="other"),
        ),
    ),
    "restarted": Case(
        Running(NOW - 180, trained_since=NOW - 7300),
        state=state(None, node(A, SAID), node(B), job=job(past=JobPast(since=NOW - 9000))),
        led_since=NOW - 190,
    ),
    "slow": Case(
        Running(NOW - 7300),
        state=replace(state(None, node(A, SAID), node(B), LEFT_OUT), active=LIMPS),
    ),
    "quarantined": Case(
        Running(NOW - 7300), state=state(None, node(A, SAID), node(B), CONTRADICTED)
    ),
    "uploads_fail": Case(
        Running(NOW - 7300),
        state=state(None, node(A, replace(SAID, trouble="gs://b/x: No space left on device"))),
    ),
    "stopping": Case(Stopping("paused", "lunch", NOW + 60)),
    "securing": Case(
        Stopping("paused", "lunch", NOW - 60), securing=Securing(Point(40, 3), NOW + 540)
    ),
    "held": Case(
        Held("its budget of $10.00 is spent", NOW - 60),
        generation=replace(PRICED, state="closed"),
        bill=Bill(usd=10.004, until=NOW - 60, unpriced_s=400.0, usd_max=10.0),
    ),
    "held_and_kept": Case(
        Held("3 attempts failed; the last: machine-a failed: rank 0: ValueError: bad", NOW - 60),
        generation=replace(PRICED, state="closed"),
        queue=tuple(f"job-{number}" for number in range(8)),
    ),
    "unprepared": Case(
        Waiting("nothing was planned yet", NOW - 20),
        state=state(None, node(A, UNFIT), node(B, replace(UNFIT, node=B))),
        generation=None,
        bill=Bill(),
    ),
    "one_unprepared": Case(
        Running(NOW - 900),
        state=state(None, node(A, SAID), node(B), node(C, replace(UNFIT, node=C))),
    ),
    "store_away": Case(Running(NOW - 7300), is_away=True, generation=G),
}


def shown(case: Case) -> str:
    """The text of a moment, by way of what the server would send."""
    known = case.state or state()
    if known.active is not None:
        record = replace(
            known.job,
            steps=case.steps,
            bill=case.bill,
            state="held" if case.bill.usd_max else "running",
        )
        active = grouped(
            known.active,
            phase=Running(NOW) if isinstance(case.phase, Planning) else case.phase,
            job=record.id,
            generation=case.generation,
            securing=case.securing,
        )
        active = case.phase.put(active) if isinstance(case.phase, Planning) else active
        known = known.with_job(record)
        for name in case.queue:
            known = known.with_job(job(id=JobId(name), state="queued"))
        known = replace(known, active=active, durables={JOB: DURABLE} if case.has_plan else {})
    plan = json.loads(PLAN.read_text(encoding="utf-8")) if case.has_plan else None
    told_at = {committed_id(JOB, DURABLE): NOW - 90}
    about = ABOUT if case.generation else {}
    pace = StepRate()
    if case.step_s is not None:
        pace.seen.extend((NOW + n * case.step_s, 38 + n) for n in range(3))
    seen = render.active_view(known, pace, plan, about, told_at, NOW, feed=case.feed)
    store = (
        StoreView(False, NOW - 42, "etcd refused: etcdserver: permission denied")
        if case.is_away
        else StoreView(True, None)
    )
    service = Service(True, store, (), {}, Refusals(0, {}), None)
    ages, nodes = FirstSeen(), render.nodes_view(known).nodes
    for each in problems_of(service, seen, nodes, NOW - 720):
        ages.since(each, NOW - 1800, NOW - 720)
    problems = problems_of(service, seen, nodes, NOW)
    status = Status(
        cluster="prod",
        at=NOW,
        leads=True,
        term=7,
        leader=LeaderView("head-1", "10.0.0.1:7077", case.led_since),
        store=store,
        job=seen,
        **render.queue_view(known),
        unsound=render.unsound_view(known),
        nodes=render.counts_view(known),
        leaving=render.leaving_view(known),
        problems=tuple(each.text for each in problems),
        problems_since=tuple(ages.since(each, NOW - 1800, NOW) for each in problems),
        usd_per_hour=79.2,
    )
    return status_text(json.loads(json.dumps(plain(status)))) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_status_screen_equals_its_golden_file(name):
    file = HERE / f"{name}.txt"
    text = shown(CASES[name])
    if os.environ.get("SAILOR_RETELL"):
        file.write_text(text, encoding="utf-8")
        return
    assert text == file.read_text(encoding="utf-8")


def test_jobs_are_listed_with_their_steps_and_the_end_of_the_one_that_trains():
    running = state(Running(NOW - 60), job=job(steps=100), step_s=2.0)
    known = running.with_job(job(id=JobId("other"), state="paused", steps=2000))
    known = replace(known, durables={JobId("other"): Durable(Point(1030, 3), "m", "0" * 64)})
    known = known.with_job(job(id=JobId("over"), state="done"))
    found = json.loads(json.dumps(plain(render.jobs_view(known))))["jobs"]
    _, _, first, second, third = jobs_text(found).splitlines()
    assert first.split()[:6] == ["job", "running", "40/100", *timestamp(NOW + 120).split(), "0"]
    assert second.split()[:4] == ["other", "paused", "1030/2000", "-"]
    assert third.split()[:4] == ["over", "done", "-", "-"]
    older = [{k: v for k, v in row.items() if k not in ("step", "ends_at")} for row in found]
    assert "40" not in jobs_text(older).splitlines()[2]


def test_a_job_that_starts_after_a_failure_says_so_though_a_better_plan_is_looked_for():
    asks = Planning(4, (A, B), "c could help again", False, NOW + 60)
    failed = generation(reason="machine-b failed: rank 0 was killed")
    starts = state(replace(asks, before=STARTING), generation=failed)
    view = render.phase_view(starts, starts.active)
    assert (view.name, view.reason, view.trains) == ("starting", failed.reason, False)
    trains = state(asks, generation=failed)
    view = render.phase_view(trains, trains.active)
    assert (view.name, view.reason, view.trains) == ("planning", asks.reason, True)


def test_a_job_that_runs_again_tells_the_reason_of_its_generation_not_of_its_last_order():
    moved = generation(reason="a is lost: its lease expired")
    runs = state(Running(BEGAN), job=job(reason="resume was ordered (by root)"), generation=moved)
    assert render.jobs_view(runs).jobs[0].reason == moved.reason


def test_a_job_whose_budget_ends_before_its_steps_has_no_end():
    poor = job(steps=10_000, bill=Bill(usd=1.0, until=NOW, usd_max=1.5))
    runs = generation(restore=FIRST, usd_per_hour=10.0)
    running = state(Running(NOW - 60), job=poor, generation=runs, step_s=2.0)
    assert render.jobs_view(running).jobs[0].ends_at is None
    rich = running.with_job(replace(poor, bill=replace(poor.bill, usd_max=1000.0)))
    assert render.jobs_view(rich).jobs[0].ends_at == NOW + 2.0 * (10_000 - 40)


def test_the_last_order_is_told_whatever_job_it_was_about():
    at = [FeedEvent(n, NOW - 9 + n, "order", text, job=of) for n, of, text in (
        (1, JOB, "cordoning d was ordered"), (2, "other", "pausing other was ordered (by bob)")
    )]  # fmt: skip
    assert last_told(at, "order", JOB) == Told(NOW - 8, at[0].text)
    told = last_told(at, "order")
    view = render.active_view(state(None), StepRate(), None, {}, {}, NOW, feed=at)
    for of_job in (view, None):
        shown = Status("prod", NOW, True, 7, None, StoreView(True, None), of_job, 0, {}, ())
        shown = replace(shown, last_order=told)
        text = status_text(json.loads(json.dumps(plain(shown))))
        assert [line.endswith("pausing other was ordered (by bob)") for line in text.splitlines()
                if line.startswith("last order")] == [True]  # fmt: skip


def told(*events: FeedEvent) -> tuple[str, float | None]:
    found = last_told(events, "order")
    assert found is not None
    return found.result, found.result_at


def test_the_last_order_is_told_with_what_came_of_it():
    """What settled it first, and not a later event."""
    back = FeedEvent(1, NOW, "order", f"a rollback of {JOB} was ordered: odd", job=JOB, order="x")
    move = FeedEvent(3, NOW + 9, "reconfigured", "moved", job=JOB, generation=4, step=5,
                     settled=Settled(("x",), 5))  # fmt: skip
    later = replace(move, id=4, at=NOW + 99, generation=5, settled=None)
    done = "generation 4 runs from step 5", NOW + 9
    assert told(back, move, later, replace(move, id=5, generation=6)) == done
    assert told(back, later) == told(replace(back, order="y"), move) == ("", None)
    assert told(replace(back, order=""), move) == ("", None)
    kept = replace(move, kind="note", text="step 30 is durable, as ordered")
    assert told(back, later, kept) == ("step 30 is durable, as ordered", NOW + 9)
    paused = replace(kept, kind="transition", text="paused: lunch (by bob)")
    assert told(back, later, paused) == ("paused", NOW + 9)
    shown = status_with(Told(NOW, back.text, *done))
    assert f"odd; {timestamp(NOW + 9)}: generation 4 runs from step 5" in shown


def status_with(order: Told) -> str:
    shown = Status("prod", NOW, True, 7, None, StoreView(True, None), None, 0, {}, ())
    return status_text(json.loads(json.dumps(plain(replace(shown, last_order=order)))))


def test_every_golden_file_belongs_to_a_case():
    assert {file.stem for file in HERE.glob("*.txt")} == set(CASES)


def test_slow_nodes_are_explained_below_the_table():
    known = replace(state(None, node(A, SAID), node(B), LEFT_OUT), active=LIMPS)
    shown = json.loads(json.dumps(plain(render.nodes_view(known))))["nodes"]
    assert [each["state"] for each in shown] == ["ready", "ready", "slow"]
    assert nodes_text(shown).splitlines()[-2:] == [
        "machine-b is slow: it computes 1.8 times as long as it did before, since step 10;"
        " it stays: no plan is better",
        "machine-c is slow: it computes 4.2 times as long as others with the same work",
    ]


def test_a_drained_node_whose_agent_has_stopped_is_counted_once():
    stopped = changed(GONE, absent_since=NOW)
    told = shown(Case(Running(NOW - 900), state=state(None, node(A, SAID), node(B), stopped)))
    assert "nodes       2 ready, 1 suspect\n" in told


def test_quarantined_node_counts_as_cordoned_and_says_why():
    known = state(None, node(A, SAID), CONTRADICTED)
    shown = json.loads(json.dumps(plain(render.nodes_view(known))))["nodes"]
    assert [(each["state"], each["cordoned"]) for each in shown] == [
        ("ready", False),
        ("cordoned", True),
    ]
    why = f"machine-c: {CONTRADICTED.exclusion.wrong_bits}"
    assert nodes_text(shown).splitlines()[-2:] == [why, "no node that trains is slow"]


def test_status_names_the_jobs_that_are_paused_and_what_ends_that():
    known = state(None, node(A)).with_job(
        job(id=JobId("other"), state="paused", reason="pause was ordered", steps=2000)
    )
    durable = Durable(Point(1030, 3), "m", "0" * 64)
    known = replace(known, durables={JobId("other"): durable})
    (paused,) = json.loads(json.dumps(plain(render.queue_view(known)["paused"])))
    reason = "pause was ordered"
    at = {"step": 1030, "steps": 2000, "held_at": None}
    at_first = replace(known, generations={JobId("other"): generation(A, state="closed")})
    view = render.job_view(at_first, JobId("other"))
    assert view is not None
    assert view.step == 1030, "not where its last generation began"
    assert paused == {"id": "other", "state": "paused", "reason": reason, "unpaid": "", **at}
    shown_now = json.loads(
        json.dumps(
            plain(Status("prod", NOW, True, 7, None, StoreView(True, None), None, 0, {}, ()))
        )
    )
    text = status_text(shown_now | {"paused": [paused]})
    assert "job         none" in text
    about = "other, step 1,030 of 2,000: pause was ordered"
    assert f"paused      {about}; sailorctl resume other goes on" in text
    older = {name: value for name, value in paused.items() if name not in at}
    assert "paused      other: pause" in status_text(shown_now | {"paused": [older]})


def test_a_speed_far_from_the_prediction_is_shown_in_words():
    def line(rate: float) -> str:
        about = {"estimate": {"iteration_s": 2.0, "source": "measured"}}
        known = state(None, node(A, replace(SAID, tokens_per_s=rate)), node(B))
        view = render.active_view(
            known, StepRate(), None, about | {"tokens_per_iteration": 2000}, {}, NOW
        )
        shown_job = json.loads(json.dumps(plain(view)))
        return next(each for each in _job_lines(shown_job, NOW) if each.startswith("throughput"))

    assert "100% of it)" in line(1000.0)
    assert "than predicted" not in line(1000.0)
    assert "60% of it), much slower than predicted" in line(600.0)
    assert "200% of it), much faster than predicted" in line(2000.0)


def test_a_hang_is_shown_with_whom_the_ranks_wait_for_and_until_when():
    hang = Hang("rank 2 has not arrived (computing)", (B,))
    known = state(None, node(A, replace(SAID, hang=hang)), node(B))
    view = render.active_view(known, StepRate(), None, {}, {}, NOW)
    assert view is not None
    assert known.active is not None
    (said,) = view.troubles
    waited = NOW - known.active.progress.advanced_at
    assert said == (
        f"no step for {waited:.1f} s: rank 2 has not arrived (computing) on machine-b; "
        "given up after 2 min"
    )


def test_a_few_names_more_than_usual_are_not_hidden():
    assert name_some("abcdefgh") == "a, b, c, d, e, f, g, h"
    assert name_some("abcdefghi") == "a, b, c, d, e, f and 3 more"


def test_a_notice_whose_time_is_up_ends_in_no_seconds():
    leaves = changed(
        node(B), draining_since=NOW - 60, record=replace(node(B).record, leaves_at=NOW - 2)
    )
    text = shown(replace(CASES["running"], state=state(Running(BEGAN), node(A, SAID), leaves)))
    assert "machine-b is draining, its time is up" in text
    assert "ends in 0.0 s" not in text


def test_an_earlier_training_loss_is_shown_beside_the_present_one():
    view = plain(render.active_view(state(Running(BEGAN)), StepRate(), None, {}, {}, NOW))
    then = {"at": NOW - 600, "step": 2, "loss": 3.051, "per_s": 1.0, "generation": 3}
    view = json.loads(json.dumps(view)) | {"earlier": then}
    view["measured"]["loss"] = 2.71
    assert "loss 2.71 (3.051 10 min ago), " in "\n".join(_job_lines(view, NOW))
    view["earlier"]["loss"] = None
    assert "loss 2.71, " in "\n".join(_job_lines(view, NOW))
