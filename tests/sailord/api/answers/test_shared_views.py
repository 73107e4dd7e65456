"""What the API says of jobs that share the cluster: each with its own nodes, phase and reasons."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import JobId
from sailord.api.answers import render
from sailord.api.answers.losses import losses_of_parts, losses_view
from sailord.core.model.phases import Running, Waiting
from sailord.core.sharing.parts import Parts, whole
from sailord.text.cluster_text import beside_lines, headline_of
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    NOW,
    A,
    B,
    C,
    D,
    generation,
    job,
    node,
    report,
    state,
)

OTHER = JobId("other")
FIRST = state(Running(BEGAN), node(A), node(B))
SECOND = state(
    Waiting("next in the queue", NOW),
    *(node(id_, report(id_, "idle", sealed=())) for id_ in (C, D)),
    job=job(id=OTHER, part=(C, D), steps=200),
    generation=None,
)
PARTS = Parts(FIRST, {OTHER: SECOND})


def test_each_job_is_listed_with_its_phase_before_those_that_wait():
    waits = replace(job(), id=JobId("waits"), state="queued")
    first = replace(FIRST, jobs={**FIRST.jobs, waits.id: waits})
    parts = replace(PARTS, first=first)
    rows = render.jobs_view(whole(parts), parts.all()).jobs
    assert [(row.id, row.phase) for row in rows] == [
        (JOB, "running"), (OTHER, "waiting"), (waits.id, None),
    ]  # fmt: skip


def test_jobs_beside_each_other_are_shown_with_their_nodes():
    first, second = render.running_view(PARTS.all())
    assert (first.id, first.phase, first.nodes) == (JOB, "running", ("machine-a", "machine-b"))
    assert (second.id, second.phase, second.nodes) == (OTHER, "waiting", ("machine-c", "machine-d"))
    assert render.running_view([FIRST]) == (), "one that has the cluster alone is `job`"
    rows = [{**{name: getattr(each, name) for name in each.__slots__}} for each in (first, second)]
    assert beside_lines(rows, {"id": JOB}) == [
        "beside it   other: waiting, step 40 of 200, 2 nodes (machine-c, machine-d)"
    ]
    assert headline_of(rows[1] | {"step_s": 0.25}) == (
        "waiting, step 40 of 200, 0.25 s each, 2 nodes"
    )


def test_a_node_says_what_the_job_that_has_it_would_lose():
    trains = state(
        Running(BEGAN), *(node(id_, replace(report(id_), job=OTHER)) for id_ in (C, D)),
        job=job(id=OTHER, part=(C, D)), generation=replace(generation(C, D), job=OTHER),
    )  # fmt: skip
    parts = replace(PARTS, others={OTHER: trains})
    found = losses_of_parts(parts.all(), lambda _: None)
    assert {id_: found[id_].kept_on for id_ in (A, C)} == {A: ("machine-b",), C: ("machine-d",)}
    assert losses_view(whole(parts))[C].text == "0 steps lost: the job does not train on it"


def test_a_node_of_another_job_is_not_called_idle():
    together = {view.name: view.idle for view in render.nodes_view(whole(PARTS)).nodes}
    assert together["machine-c"], "for one job alone it would be"
    apart = render.nodes_view(whole(PARTS), parts=PARTS.all()).nodes
    assert [(view.name, view.idle) for view in apart] == [
        (f"machine-{id_}", "") for id_ in (A, B, C, D)
    ]
