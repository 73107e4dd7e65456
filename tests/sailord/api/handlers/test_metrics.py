"""Figures for Prometheus where they differ from what the API answers."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import Durable, JobId, JobPast, Point, Saving
from sailord.api.answers import render
from sailord.api.answers.types import ActiveView
from sailord.api.handlers.metrics import counts_of_jobs, not_durable_s, of_active
from sailord.controller.step_rate import StepRate
from sailord.core.model.events import JobSubmitted
from sailord.core.model.phases import Held
from sailord.core.model.state import State
from sailord.notify.outbox import committed_id
from tests.sailord.core.states import JOB, NOW, A, B, act, durable, generation, job, node, report
from tests.sailord.core.states import state as state_of

DURABLE = durable(30)
PLACE = Saving(uri="gs://bucket/x")


def view_of(state: State, safe: Point | None = None) -> ActiveView:
    told_at = {committed_id(JOB, DURABLE): NOW - 90}
    view = render.active_view(state, StepRate(), None, {}, told_at, state.now, safe)
    assert view is not None
    return view


def began(saving: Saving = PLACE, known: Durable | None = None) -> State:
    """A job that has done 40 steps within 7,200 s."""
    state = state_of(job=job(saving=saving, past=JobPast(since=NOW - 7200)))
    return state if known is None else replace(state, durables={JOB: known})


def test_a_held_job_that_yielded_the_cluster_is_counted_as_held() -> None:
    left = [node(id_, report(id_, "idle", sealed=())) for id_ in (A, B)]
    closed = generation(state="closed")
    before = state_of(
        Held("3 attempts failed", NOW - 9), *left, job=job(state="held"), generation=closed
    )
    other = job(id=JobId("other"), state="paused", reason="pause was ordered")
    after, _ = act(before.with_job(other), JobSubmitted(NOW, job(id=JobId("next"), state="queued")))
    assert after.jobs[JOB].state == "paused"
    assert counts_of_jobs(after) == {"held": 1, "running": 1, "paused": 1}


def test_age_without_a_durable_step_counts_from_the_jobs_start() -> None:
    """A bucket without rights: the alert has to fire though there never was a durable step."""
    state = began()
    assert not_durable_s(state, view_of(state)) == 7200
    once = began(known=DURABLE)
    assert not_durable_s(once, view_of(once)) == 90


def test_a_job_without_a_place_for_checkpoints_has_no_age() -> None:
    state = began(Saving())
    assert not_durable_s(state, view_of(state)) is None


def test_steps_at_risk_are_metrics_for_the_loss_of_one_node_and_of_all() -> None:
    state = began(known=DURABLE)

    def told(safe: Point | None) -> dict[str, float]:
        families = of_active(view_of(state, safe), None)
        return {f.name: f.samples[0].value for f in families if "at_risk" in f.name}

    assert told(Point(39, 3)) == {"sailor_steps_at_risk": 10, "sailor_steps_at_risk_one_node": 1}
    assert told(None) == {"sailor_steps_at_risk": 10}
