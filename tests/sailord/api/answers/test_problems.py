"""What needs a person: what an operator must not miss, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.codec import plain
from agents.protocol.records import FIRST, Bill, ComputeTimes, JobId, NodeId
from sailord.api.answers import render
from sailord.api.answers.node_types import NodeView
from sailord.api.answers.problems import (
    OVERDUE_S,
    REFUSALS_MANY,
    SETTLED_S,
    FirstSeen,
    OpenProblem,
    Service,
    problems_of,
)
from sailord.api.answers.types import CapacityGlance, PausedJob, Refusals, StoreView
from sailord.controller.step_rate import StepRate
from sailord.core.model.nodes import LostNode
from sailord.core.model.phases import Held, Running, Waiting
from sailord.core.model.state import Progress
from sailord.core.model.stragglers import NodeSpeeds, Past, Straggler
from sailord.core.queries.forecast import at_risk
from sailord.text.cluster_text import _paused_lines, cure_of_hold, status_text
from sailord.text.problem_text import problem_texts
from tests.sailord.core.states import NOW, A, B, generation, job, node, order, report
from tests.sailord.core.states import state as state_of

WELL = Service(
    has_leader=True,
    store=StoreView(True, None),
    unheard=(),
    unreadable={},
    refusals=Refusals(0, {}),
    capacity=None,
)
NODE = NodeView(
    id="a.1", name="a", state="ready", zone="z", machine="m", gpu="g", gpus=1, spot=False,
    address="h:1", cordoned=False, leaves_at=None, taking=None, generation=1, step=5, failure="",
    why_lost="", trouble="", safe_to_stop=False, unsound="", slow="",
)  # fmt: skip
SPEEDS = (A, 0.3), (B, 0.6)
SLOWED = Straggler(4.0, "before for a step", NOW - 60, 10, 40, verb="takes")


def texts(*about: Any, **more: Any) -> tuple[str, ...]:
    return tuple(each.text for each in problems_of(*about, **more))


def told(service: Service = WELL, *nodes: NodeView, now: float = 1000.0) -> tuple[str, ...]:
    return texts(service, None, nodes or (NODE,), now)


def test_doctor_lists_nothing_for_a_healthy_cluster() -> None:
    assert told() == ()
    assert told(WELL, replace(NODE, state="draining", leaves_at=1000.0 - OVERDUE_S)) == ()
    refused = Refusals(REFUSALS_MANY - 1, {"token": 9}, 999.0, "h", "token")
    assert told(replace(WELL, refusals=refused)) == ()


def test_doctor_names_slow_nodes_and_since_when() -> None:
    slow = replace(NODE, slow="it computes 4.0 times as long as it did before", slow_since=955.0)
    (found,) = problems_of(WELL, None, (slow,), 1000.0)
    assert found.since == 955.0
    assert found.text == (
        "a is slow: it computes 4.0 times as long as it did before; look at its heat and load; "
        "sailorctl drain a moves the job off it"
    )
    (text,) = told(WELL, replace(slow, state="slow", slow_since=None))
    assert text.endswith(
        "it is left out; once it is mended, sailorctl uncordon a lets plans use it"
    )


def test_doctor_says_that_the_job_is_slow_where_no_node_is_to_blame() -> None:
    """The node that has slowed down most is named."""
    busy = ComputeTimes((1.0, 1.0))
    nodes = [node(id_, report(id_, busy=((rank, s),))) for rank, (id_, s) in enumerate(SPEEDS)]
    watch = NodeSpeeds(3, past={A: Past(0.3, 1, 0.3), B: Past(0.3, 1, 0.3)}, job=SLOWED)
    state = state_of(Running(NOW - 900), *nodes, generation=generation(busy=busy), speeds=watch)
    view = render.active_view(state, StepRate(), None, {}, {}, NOW)
    (found,) = problems_of(WELL, view, (NODE,), NOW)
    assert found.since == NOW - 60
    assert found.text == (
        "job is slow: it takes 4.0 times as long as before for a step, since step 10; machine-b "
        "has slowed down most: 2.0 times as long; sailorctl timeline shows where its steps wait"
    )
    recent = replace(watch, job=replace(SLOWED, since=NOW - 50))
    early = state_of(Running(NOW - 900), *nodes, generation=generation(busy=busy), speeds=recent)
    view = render.active_view(early, StepRate(), None, {}, {}, NOW)
    assert problems_of(WELL, view, (NODE,), NOW) == ()


def test_doctor_lists_machines_that_share_a_name() -> None:
    """A machine that restarted does not count twice: its old life is lost, or had the same
    address."""
    other = replace(NODE, id="a.2", address="h:2")
    (found,) = told(WELL, NODE, other)
    assert found == "several machines have the name a (h:1, h:2); set name in their agent.toml"
    assert told(WELL, NODE, replace(other, address="h:1")) == ()
    assert told(WELL, NODE, replace(other, state="lost", spot=True)) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "suspect"}, "a is suspect; its lease has ended: unless its agent is heard"),
        (
            {"state": "lost", "why_lost": "its agent is silent"},
            "a is lost: its agent is silent; if it is up, start its sailor-agent; journalctl -u",
        ),
        ({"failure": "out of memory"}, "a is ready: out of memory; sailorctl logs a shows more"),
        ({"unsound": "GPU 3 is broken: replace it"}, "a is not used: GPU 3 is broken: replace it"),
        ({"unsound": "setup `make` exited with 2"}, "with 2; sailorctl logs a --setup shows"),
        ({"trouble": "no room"}, "a: no room; journalctl -u sailor-agent there says"),
        ({"leaves_at": 900.0}, "sailorctl withdraw a"),
    ],
)
def test_doctor_lists_each_problem_of_a_node(changes: dict[str, Any], words: str) -> None:
    (found,) = told(WELL, replace(NODE, **changes))
    assert words in found


def test_a_lost_node_stays_a_problem_after_its_record_is_gone() -> None:
    lost = LostNode(NodeId("b.1"), "b", 900.0, "its lease expired", ("z", "m"), "b:1")
    (problem,) = problems_of(replace(WELL, lost=(lost,)), None, (NODE,), 1000.0)
    assert problem.since == 900.0
    assert problem.text.startswith(
        "b was lost: its lease expired; if it is up, start its sailor-agent; journalctl"
    )
    still = replace(NODE, id="b.1", name="b", state="lost", why_lost="its lease expired")
    (text,) = told(replace(WELL, lost=(lost,)), still)
    assert text.startswith("b is lost"), "it is told once"


@pytest.mark.parametrize("state", ["suspect", "lost"])
def test_a_draining_spot_node_is_no_problem(state: Any) -> None:
    gone = replace(NODE, state=state, why_lost="preempted", failure="its peer is lost", spot=True)
    assert told(WELL, gone) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"has_leader": False}, "no leader is elected"),
        ({"store": StoreView(False, 1.0, "refused")}, "the store does not answer (refused)"),
        ({"store": StoreView(True, None, "no space")}, "controller: no space; make room in it"),
        ({"unheard": ("http://h: 500",)}, "does not answer: http://h: 500; see that it runs"),
        ({"unreadable": {"/k": "no number"}}, "cannot be read: /k: no number; docs/operations"),
        ({"refusals": Refusals(REFUSALS_MANY, {}, 1.0, "h", "token")}, "10 requests within"),
    ],
)
def test_doctor_lists_each_problem_of_the_service(changes: dict[str, Any], words: str) -> None:
    (found,) = told(replace(WELL, **changes))
    assert words in found


def test_a_budget_or_deadline_at_risk_needs_a_person() -> None:
    record = job(steps=1_040, bill=Bill(usd=5.0, until=NOW, usd_max=100.0), deadline=NOW + 1800)
    runs = generation(restore=FIRST, usd_per_hour=1000.0)
    state = state_of(job=record, generation=runs, progress=Progress(40, NOW, 3.6))
    view = render.active_view(state, StepRate(), None, {}, {}, NOW)
    risks = at_risk(state)
    assert len(risks) == 2
    said = texts(WELL, view, (NODE,), NOW, (), risks)
    assert [
        each.startswith(f"job: {risk}") for each, risk in zip(said, risks.values(), strict=True)
    ]
    assert ["sailorctl budget" in said[0], "faster or more nodes" in said[1]] == [True, True]


def test_a_deadline_that_rented_instances_cannot_keep_needs_a_person() -> None:
    late = "the deadline will be missed by 13 min or more"
    glance = CapacityGlance(4, 4, 0, 0, 0, (), 1.0, 1.0, "", (), deadline=late, is_late=True)
    (found,) = told(replace(WELL, capacity=glance))
    assert (
        found
        == f"{late}; it needs faster or more instances: allow more pools, or raise the budgets"
    )
    kept = replace(glance, deadline="spot instances suffice", is_late=False)
    assert told(replace(WELL, capacity=kept)) == ()


def test_a_cluster_without_nodes_says_so() -> None:
    assert texts(WELL, None, (), 0.0) == ("there is no node; start sailor-agent on one",)


def test_a_cluster_that_rents_says_why_it_has_no_node() -> None:
    glance = CapacityGlance(2, 0, 2, 0, 0, (), 1.0, 1.0, "", ())
    starting = replace(WELL, capacity=glance)
    said = "there is no node yet; sailorctl capacity shows which instances are rented"
    assert texts(starting, None, (), 0.0) == (said,)
    too_dear = replace(glance, wanted=0, awaited=0, why_not_rented="objective.max_usd_total: is 5")
    first, _ = texts(replace(WELL, capacity=too_dear), None, (), 0.0)
    assert first == "no instance is wanted, since there is no plan: objective.max_usd_total: is 5"


@pytest.mark.parametrize(
    ("problems", "line"),
    [
        ([], "problems    none"),
        (["a is lost"], "problems    a is lost"),
        (["a is lost", "b: full"], "problems    a is lost (1 of 2: sailorctl doctor)"),
    ],
)
def test_status_tells_the_first_problem(problems: list[str], line: str) -> None:
    status = {
        "cluster": "c", "at": 0.0, "leader": None, "store": {"answers": True, "trouble": ""},
        "job": None, "queued": 0, "nodes": {}, "unsound": {}, "leaving": [], "capacity": None,
        "problems": problems, "unreadable": {}, "refusals": {"last_hour": 0}, "running": [],
        "paused": [],
    }  # fmt: skip
    assert status_text(status).splitlines()[1] == line


def test_doctor_lists_a_held_job_that_yielded_the_cluster() -> None:
    yielded = PausedJob("first", "paused", "second has the cluster; held: 3 attempts failed")
    by_hand = PausedJob("other", "paused", "lunch (by alice)")
    (said,) = texts(WELL, None, (NODE,), 1000.0, (yielded, by_hand))
    assert said.startswith("first was held (3 attempts failed)")
    assert "sailorctl resume first" in said


def test_a_job_whose_budget_is_spent_needs_a_larger_one_before_a_resume() -> None:
    spent = "its budget of $5.00 is spent"
    poor = PausedJob("first", "paused", f"second has the cluster; held: {spent}", spent)
    (said,) = texts(WELL, None, (NODE,), 1000.0, (poor,))
    assert said.endswith(f"sailorctl budget {poor.id} USD, then sailorctl resume {poor.id}")


@pytest.mark.parametrize("reserve_s", [0.0, 190.0])
def test_a_job_that_can_only_pay_for_saving_its_state_needs_a_larger_budget(reserve_s) -> None:
    bill = Bill(usd=4.6, until=NOW, usd_max=5.0)
    closed = replace(generation(), state="closed", usd_per_hour=8.0)
    held = state_of(Held("no plan", NOW), job=job(state="held", bill=bill), generation=closed)
    held = replace(held, options=replace(held.options, reserve_s=reserve_s))
    spent = render.active_view(held, StepRate(), None, {}, {}, NOW).spent
    other = job(id=JobId("other"), state="paused", bill=bill)
    paused = replace(held, jobs={**held.jobs, other.id: other}, generations={other.id: closed})
    (parked,) = render.paused_view(paused)
    assert [bool(spent.unpaid), bool(parked.unpaid)] == 2 * [reserve_s > 0]
    assert ("sailorctl budget" in cure_of_hold("j", plain(spent), "no plan")) is (reserve_s > 0)
    assert ("sailorctl budget" in _paused_lines([plain(parked)])[0]) is (reserve_s > 0)


def test_the_cure_of_a_spent_budget_names_job_and_sum_and_once_raised_only_the_resume() -> None:
    reason = "its budget of $1.00 is spent"

    def cure(usd_max: float) -> str:
        bill = Bill(usd=1.0, until=NOW, usd_max=usd_max)
        ran = replace(generation(), state="closed", usd_per_hour=36.0)
        of = job(state="held", bill=bill, steps=100)
        held = state_of(Held(reason, NOW), job=of, generation=ran, step=40, step_s=1.0)
        spent = render.active_view(held, StepRate(), None, {}, {}, NOW).spent
        return cure_of_hold("tale", plain(spent), reason)

    assert cure(1.0) == (
        "raise it with sailorctl budget tale USD (about $1.60 in all until its end), "
        "then sailorctl resume tale"
    )
    assert cure(1.6) == "its budget was raised since: sailorctl resume tale goes on"


def test_a_job_without_a_ready_node_is_a_problem_with_what_would_make_one_ready() -> None:
    cordoned, leaves = node(A, is_cordoned=True), node(B, draining_since=NOW - 9)
    state = state_of(Waiting("a reason", NOW - 60), cordoned, leaves, generation=None)
    state = replace(state, marks={B: (order("drain", B, reason="disk swap"),)})
    view = render.active_view(state, StepRate(), None, {}, {}, NOW)
    nodes = render.nodes_view(state).nodes
    (said,) = texts(WELL, view, nodes, NOW)
    assert "no node is ready: machine-a cordoned; machine-b draining" in said
    assert "sailorctl uncordon machine-a" in said
    assert "sailorctl withdraw machine-b" in said
    starts = render.active_view(
        state_of(Waiting("no node is ready", NOW - 60)), StepRate(), None, {}, {}, NOW
    )
    assert texts(WELL, starts, nodes, NOW) == ("job waits: no node is ready",)
    assert starts is not None
    refused = replace(starts, phase=replace(starts.phase, has_no_plan=True))
    (said,) = texts(WELL, refused, nodes, NOW)
    assert said == (
        "job waits: no node is ready; sailorctl uncordon machine-a lets plans use it again; "
        "sailorctl withdraw machine-b lets plans use it again"
    )
    kept = [replace(n, unsound="its bits were contradicted", leaves_at=NOW + 9) for n in nodes]
    assert "sailorctl uncordon" not in " ".join(texts(WELL, refused, kept, NOW))
    assert "lets plans use it" not in " ".join(texts(WELL, refused, kept, NOW))


def test_a_job_whose_budget_pays_for_no_plan_waits_with_the_order_that_raises_it() -> None:
    why = "objective.max_usd_total: is 5, and the cheapest plan needs 8.6"
    known = state_of(Waiting(why, NOW - 60))
    view = render.active_view(known, StepRate(), None, {}, {}, NOW)
    assert view is not None
    view = replace(view, phase=replace(view.phase, reason=why))
    (said,) = texts(WELL, view, (NODE,), NOW)
    assert said == f"job waits: {why}; sailorctl budget job USD raises it"


def test_a_planner_that_did_not_answer_twice_is_a_problem() -> None:
    shown = render.active_view(state_of(unanswered=2), StepRate(), None, {}, {}, NOW)
    (said,) = texts(WELL, shown, (NODE,), NOW)
    assert said.startswith("the planner did not answer 2 times in a row about job; look")
    assert texts(WELL, replace(shown, unanswered=1), (NODE,), NOW) == ()


def test_a_failing_storage_is_a_problem_with_its_cure() -> None:
    view = render.active_view(state_of(trouble="gs: full"), StepRate(), None, {}, {}, NOW)
    (said,) = texts(WELL, view, (NODE,), NOW)
    assert said == "checkpoints: gs: full; mend the storage: it is tried again by itself"


def test_a_drain_that_cannot_end_is_a_problem_with_the_order_that_cancels_it() -> None:
    leaves = node(B, draining_since=NOW - 9)
    state = state_of(None, node(A), leaves, is_refused=True, considered=frozenset((A,)))
    (said,) = texts(WELL, None, (NODE,), NOW, stuck=render.stuck_view(state))
    assert said.startswith("machine-b cannot drain: no other node can take over its part")
    assert "sailorctl withdraw machine-b" in said


def test_a_held_job_is_to_be_mended_before_it_is_resumed() -> None:
    state = state_of(Held("3 attempts failed", NOW - 60), job=job(state="held"))
    view = render.active_view(state, StepRate(), None, {}, {}, NOW)
    (said,) = texts(WELL, view, (NODE,), NOW)
    assert "mend the cause, then sailorctl resume job" in said


def test_a_held_job_beside_another_one_is_a_problem_with_its_cure() -> None:
    (said,) = texts(WELL, None, (NODE,), NOW, [PausedJob("other", "held", "3 attempts failed")])
    assert said.startswith("other is held: 3 attempts failed; mend the cause")
    assert "sailorctl resume other" in said


def test_a_problem_counts_from_when_it_was_first_seen_though_its_text_changes() -> None:
    seen, at = FirstSeen(), SETTLED_S
    full = OpenProblem("trouble", "a.1", "a: 1 GB is missing")
    assert seen.since(full, 0.0, at) == at
    assert seen.since(replace(full, text="a: 2 GB are missing"), 0.0, at + 9) == at
    assert seen.since(replace(full, subject="b.1"), 0.0, at + 9) == at + 9
    seen.keep_only([replace(full, subject="b.1")])
    assert seen.since(full, 0.0, at + 20) == at + 20, "it had ended meanwhile"


def test_what_a_new_leader_finds_stands_at_least_since_its_election() -> None:
    seen, full = FirstSeen(), OpenProblem("trouble", "a.1", "a: no room")
    assert seen.since(full, 100.0, 100.0 + SETTLED_S - 1) == 100.0
    later = replace(full, kind="unsound")
    assert seen.since(later, 100.0, 100.0 + SETTLED_S) == 100.0 + SETTLED_S
    assert seen.since(full, 500.0, 501.0) == 500.0, "it was elected again"


def test_what_the_state_knows_of_a_problem_outlives_the_leader() -> None:
    held = state_of(Held("3 attempts failed", NOW - 600), job=job(state="held"))
    view = render.active_view(held, StepRate(), None, {}, {}, NOW)
    other = PausedJob("other", "held", "3 attempts failed", held_at=NOW - 900)
    late = replace(NODE, leaves_at=NOW - 120)
    away = replace(WELL, store=StoreView(False, NOW - 30))
    found = problems_of(away, view, (late,), NOW, [other])
    assert [FirstSeen().since(each, NOW - 5, NOW) for each in found] == [
        *(NOW - 30, NOW - 600, NOW - 900, NOW - 120),
    ]


def test_doctor_says_for_how_long_a_problem_has_stood() -> None:
    status: dict[str, Any] = {
        "at": 1000.0,
        "leader": {"host": "head", "address": "h:1", "since": 100.0},
        "problems": ["new", "a is lost", "found by a new leader"],
        "problems_since": [999.5, 280.0, 100.0],
    }
    assert problem_texts(status) == [
        "new",
        "for 12 min: a is lost",
        "for at least 15 min: found by a new leader",
    ]
    older = {"at": 1000.0, "leader": None, "problems": ["a is lost"]}
    assert problem_texts(older) == ["a is lost"]
