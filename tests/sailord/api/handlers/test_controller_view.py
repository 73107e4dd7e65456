"""Orders are told in the history of the job that they concern, where several share the cluster."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agents.protocol.records import JobId
from agents.protocol.store_keys import Keys
from sailord.api.handlers.controller_view import ControllerView
from sailord.cluster_records import Gateway
from sailord.controller.cluster_state import ClusterState
from sailord.core.model.phases import Running
from sailord.core.sharing.parts import Parts
from sailord.notify.announcer import Announcer
from sailord.notify.feed import Feed
from sailord.notify.outbox import Outbox
from tests.sailord.core.states import BEGAN, JOB, A, B, C, D, generation, job, node, order, state

OTHER, PAUSED = JobId("other"), JobId("paused")
FIRST = state(Running(BEGAN), node(A), node(B)).with_job(job(id=PAUSED, state="paused"))
SECOND = state(
    Running(BEGAN),
    *(node(C), node(D)),
    job=job(id=OTHER, part=(C, D)),
    generation=replace(generation(C, D, number=9), job=OTHER),
    step=120,
)


@pytest.fixture
def view() -> ControllerView:
    unused: Any = SimpleNamespace()
    gateway = Gateway(unused, Keys("test"))
    effects = SimpleNamespace(planner=unused, agents=unused, checkpoints=unused, following=unused)
    controller: Any = SimpleNamespace(
        cluster=ClusterState(Parts(FIRST, {OTHER: SECOND})),
        announcer=Announcer(gateway, Feed(), Outbox(gateway)),
        effects=effects,
        writer=SimpleNamespace(plans={}),
        inbox=SimpleNamespace(put_report=unused),
        safe_point=unused,
        durations=unused,
        answer_to=unused,
    )
    return ControllerView(controller)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("machine-a", (JOB, 3, 40)),
        ("machine-d", (OTHER, 9, 120)),
        (D, (OTHER, 9, 120)),
        (JOB, (JOB, 3, 40)),
        (OTHER, (OTHER, 9, 120)),
        (PAUSED, (PAUSED, None, None)),
    ],
)
def test_an_order_is_told_of_the_job_that_it_concerns(
    view: ControllerView, target: str, told: tuple[str, int | None, int | None]
) -> None:
    view.tell_order(order("drain" if told[0] != target else "pause", target))
    (event,) = view.feed.kept
    assert (event.job, event.generation, event.step) == told
