"""Why there is no plan, with the planner's cure, in every answer about a job that waits for one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from agents.protocol.codec import plain
from sailord.api.answers import render
from sailord.controller.step_rate import StepRate
from sailord.core.model.events import PlanFound, PlanRefused, Ticked
from sailord.core.model.nodes import Nodes
from sailord.core.model.phases import Phase, Running, Waiting
from sailord.core.model.state import State
from sailord.text.cluster_text import jobs_text, why_text
from tests.sailord.api.answers.test_problems import WELL, texts
from tests.sailord.core.states import (
    FROM_NOTHING,
    JOB,
    NOW,
    A,
    B,
    act,
    active_of,
    node,
    phase,
    proposal,
    report,
    state,
)

WHY = "cluster: gpt2 does not fit on the 2 GPUs; it fits on 4 such GPUs"
SAID = f"no plan: {WHY}"
"""The limit, and what would help."""


def refused() -> State:
    return act(state(FROM_NOTHING), PlanRefused(NOW, 4, WHY))[0]


def told(value: Any) -> Any:
    return json.loads(json.dumps(plain(value)))


def test_every_answer_about_a_waiting_job_has_the_planners_reason_and_cure() -> None:
    known = refused()
    assert isinstance(phase(known), Waiting)
    view = render.active_view(known, StepRate(), None, {}, {}, NOW)
    assert view is not None
    reason = f"a reason; {SAID}"
    assert view.phase.reason == reason
    assert jobs_text(told(render.jobs_view(known).jobs)).splitlines()[-1].endswith(reason)
    assert "job  waiting " in jobs_text(told(render.jobs_view(known).jobs))
    job = render.job_view(known, JOB)
    assert job is not None
    said = told(render.why_view(known, job, {}, (), None))
    assert why_text(said).splitlines()[0] == f"{JOB} is waiting: {reason}"
    nodes = render.nodes_view(known).nodes
    assert texts(WELL, view, nodes, NOW) == (f"{JOB} waits: {reason}",)


def test_reason_stays_while_the_planner_is_asked_again() -> None:
    known = refused()
    before = phase(known)
    again, _ = act(replace(known, now=NOW + 700), Ticked(NOW + 700))
    active = active_of(again)
    assert active.question is not None
    assert render.phase_view(again, active).reason.endswith(SAID)
    assert active.phase == before


def test_reason_ends_once_a_plan_is_found_or_no_node_is_left() -> None:
    before = state(FROM_NOTHING, said=SAID)
    found = active_of(act(before, PlanFound(NOW, 4, proposal()))[0])
    assert found.asked.said == ""
    empty = replace(refused(), nodes=Nodes())
    assert render.phase_view(empty, active_of(empty)).reason == "a reason"


def test_throughput_before_a_wait_is_not_reported() -> None:
    def rate(of: Phase) -> float | None:
        fast = report(A, "running", tokens_per_s=1092.0)
        known = state(of, node(A, fast), node(B))
        view = render.active_view(known, StepRate(), None, {}, {}, NOW)
        assert view is not None
        return view.measured.tokens_per_s

    assert rate(Running(NOW - 5)) == 1092.0
    assert rate(Waiting("a reason", NOW - 700)) is None
