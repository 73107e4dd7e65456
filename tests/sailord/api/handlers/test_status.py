"""The status where jobs share the cluster, and metrics of a leader that has just begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Histogram

from agents.daemon.unreadable import UnreadableRecords
from agents.protocol.records import Bill, JobId
from agents.rpc.strangers import StrangerLimits
from sailord.api.answers.problems import FirstSeen
from sailord.api.handlers import problems
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.problems import look_at_problems
from sailord.api.handlers.status import metrics, status
from sailord.config import WebhookReceiver, Webhooks
from sailord.controller.durations import Durations
from sailord.controller.lost_nodes import LostNodes
from sailord.controller.step_rate import StepRate
from sailord.controller.store_health import StoreHealth
from sailord.core.model.phases import Running
from sailord.core.model.state import State
from sailord.core.sharing.parts import Parts, whole
from sailord.goodput.core.ledger import Ledger
from sailord.notify.announcer import Announcer
from sailord.notify.feed import Feed
from sailord.page.training_curve import CurvePoint, TrainingCurve, TrainingCurves
from sailord.planning.precomputed import NoPlan
from sailord.text.cluster_text import status_text
from tests.sailord.core.states import BEGAN, JOB, NOW, A, B, C, D, generation, job, node, state

OTHER = JobId("other")
BUDGET = Bill(usd=9.0, until=NOW, usd_max=10.0)
FIRST = state(
    Running(BEGAN),
    job=job(steps=100_000, bill=BUDGET),
    generation=generation(usd_per_hour=8.0),
    step_s=0.5,
)
"""Its budget is at risk."""
LEAVES = node(D, draining_since=NOW - 9)
SECOND = state(
    Running(BEGAN),
    *(node(C), LEAVES),
    job=job(id=OTHER, part=(C, D)),
    generation=replace(generation(C, D), job=OTHER),
    considered=frozenset((C,)),
    is_refused=True,
)
"""Its second node cannot drain."""
ITERATION_S = {JOB: 0.5, OTHER: 7.0}


def served(parts: Parts) -> Any:
    """A sailord that leads, and has read no plan since it began."""

    async def read_plan(_job: str, _sha: str) -> bytes:
        return b"{}"

    async def read_about(job: str, _sha: str) -> dict[str, Any]:
        return {"estimate": {"iteration_s": ITERATION_S[job]}}

    outbox: Any = SimpleNamespace(at_of={}, failing={}, waiting=0)
    gateway: Any = SimpleNamespace(read_plan=read_plan, read_about=read_about)
    announcer = Announcer(gateway, Feed(), outbox)
    cluster = SimpleNamespace(
        state=whole(parts),
        last_led=whole(parts),
        led_parts=tuple(parts.all()),
        led_of=lambda id_: parts.others.get(id_, whole(parts)),
        leader=None,
        outbox=outbox,
        feed=announcer.feed,
        risks=announcer.risks,
        step_rate_of=lambda _: StepRate(),
        safe_point=lambda _=None: None,
        following=lambda _: None,
        store=StoreHealth(),
        plans={},
        durations=Durations(),
        plan_requests=0,
        planner=SimpleNamespace(precomputed_losses=0),
        lost_nodes=LostNodes(),
    )
    return SimpleNamespace(
        cluster=cluster,
        clock=SimpleNamespace(now=lambda: NOW),
        config=SimpleNamespace(cluster_name="prod", webhooks=Webhooks()),
        gateway=gateway,
        own_gateway=SimpleNamespace(unreadable=UnreadableRecords()),
        strangers=StrangerLimits(),
        plans_seen={},
        first_seen=FirstSeen(),
        curves=TrainingCurves(),
        capacity=None,
        goodput=SimpleNamespace(ledger=Ledger(), stored=Ledger(), stored_shares={}),
        request_times=Histogram("sailor_http_request_seconds", "None yet.", registry=None),
    )


def asked(api: Any, **query: str) -> Any:
    return SimpleNamespace(app={CONTEXT: api}, query=query)


async def told(parts: Parts, **query: str) -> Mapping[str, Any]:
    answer = await status(asked(served(parts), **query))
    found: Mapping[str, Any] = json.loads(answer.text or "")
    return found


async def test_nodes_without_which_the_job_waits_are_named() -> None:
    api = served(Parts(FIRST, {}))
    none = {B: NoPlan("cluster: too small")}
    api.cluster.following = none.get
    known = json.loads((await status(asked(api))).text or "")
    assert known["job"]["needed"] == ["machine-b"]
    said = "without machine-b it waits: there is no plan for the other nodes"
    assert said in status_text(known)
    assert "without any of a, b it waits" in status_text(
        {**known, "job": {**known["job"], "needed": ["a", "b"]}}
    )
    api.cluster.following = {}.get
    assert "it waits" not in status_text(json.loads((await status(asked(api))).text or ""))


async def test_the_status_of_a_job_names_its_own_risks() -> None:
    parts = Parts(FIRST, {OTHER: SECOND})
    first, second = await told(parts), await told(parts, job=OTHER)
    assert [each["job"]["id"] for each in (first, second)] == [JOB, OTHER]
    assert any(each.startswith(f"{JOB}: at its present speed") for each in first["problems"])
    assert not [each for each in second["problems"] if "at its present speed" in each]


async def test_a_drain_that_cannot_end_is_told_whichever_job_has_the_node() -> None:
    parts = Parts(FIRST, {OTHER: SECOND})
    for query in ({}, {"job": OTHER}):
        found = await told(parts, **query)
        (leaving,) = found["leaving"]
        assert (leaving["name"], bool(leaving["stuck"])) == ("machine-d", True)
        assert any(each.startswith("machine-d cannot drain") for each in found["problems"])


def figures(text: str) -> dict[str, float]:
    lines = (line.split(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value, *_ in lines if "{" not in name}


def alone() -> State:
    return state(Running(BEGAN), node(A), node(B))


async def test_a_leader_knows_the_predicted_step_time_before_any_status_request() -> None:
    """`SailorNoStep` compares with it."""
    answer = await metrics(asked(served(Parts(alone()))))
    found = figures(answer.text or "")
    assert found["sailor_step"] == 40
    assert found["sailor_step_predicted_seconds"] == 0.5


async def test_jobs_of_different_models_with_the_same_plan_have_their_own_predictions() -> None:
    active = SECOND.active
    assert active is not None
    assert active.generation is not None
    assert FIRST.active is not None
    assert FIRST.active.generation is not None
    alike = replace(active.generation, plan=FIRST.active.generation.plan)
    second = replace(SECOND, active=replace(active, generation=alike))
    api = served(Parts(FIRST, {OTHER: second}))
    found = []
    for query in ({}, {"job": OTHER}):
        answer = await status(asked(api, **query))
        found.append(json.loads(answer.text or "")["job"]["predicted"]["iteration_s"])
    assert found == [0.5, 7.0]


async def test_a_problem_counts_from_the_watch_that_saw_it_first_whichever_job_it_is_of() -> None:
    api, times = served(Parts(FIRST, {OTHER: SECOND})), [NOW - 60, NOW]
    api.clock = SimpleNamespace(now=lambda: times[0])
    look_at_problems(api)
    times.pop(0)
    found = json.loads((await status(asked(api, job=OTHER))).text or "")
    stuck = next(n for n, said in enumerate(found["problems"]) if "cannot drain" in said)
    assert found["problems_since"][stuck] == NOW - 60
    look_at_problems(api)
    api.cluster.led_parts = (FIRST, replace(SECOND, nodes=FIRST.nodes))
    look_at_problems(api)
    assert ("stuck", "machine-d") not in api.first_seen._at


async def test_the_speed_of_ten_minutes_ago_stands_beside_the_present_one() -> None:
    api = served(Parts(FIRST, {OTHER: SECOND}))
    samples = [CurvePoint(NOW - ago, 1, None, per_s, 3) for ago, per_s in (
        (900, 500.0), (700, 1865.0), (650, None), (590, 7.0)
    )]  # fmt: skip
    api.curves.by_job[FIRST.job.id] = TrainingCurve(FIRST.job.id, samples)
    found = json.loads((await status(asked(api))).text or "")
    (line,) = [each for each in status_text(found).splitlines() if each.startswith("throughput")]
    assert line.endswith("; 12 min ago 1,865")
    assert json.loads((await status(asked(api, job=OTHER))).text or "")["job"]["earlier"] is None


async def test_a_young_job_is_compared_with_its_first_sample() -> None:
    api = served(Parts(FIRST, {OTHER: SECOND}))
    samples = [CurvePoint(NOW - ago, 1, 3.5, 7.0, 3) for ago in (90, 30)]
    api.curves.by_job[FIRST.job.id] = TrainingCurve(FIRST.job.id, samples)
    assert json.loads((await status(asked(api))).text or "")["job"]["earlier"]["at"] == NOW - 90
    samples.pop(0)
    assert json.loads((await status(asked(api))).text or "")["job"]["earlier"] is None


async def test_the_status_names_the_hosts_of_receivers_but_not_their_secret_addresses() -> None:
    api = served(Parts(FIRST, {OTHER: SECOND}))
    assert json.loads((await status(asked(api))).text or "")["receivers"] == []
    slack = WebhookReceiver("https://hooks.slack.com/services/secret", format="slack")
    api.config.webhooks = Webhooks(receivers=(slack,))
    found = (await status(asked(api))).text or ""
    assert json.loads(found)["receivers"] == ["hooks.slack.com (slack)"]
    assert "services/secret" not in found


async def test_an_unknown_job_is_answered_as_everywhere() -> None:
    api = served(Parts(FIRST, {OTHER: SECOND}))
    answer = await status(asked(api, job="nope"))
    (problem,) = json.loads(answer.text or "")["problems"]
    assert (answer.status, problem["what"]) == (404, "no such job")
    assert problem["cure"].startswith("choose from ")


async def test_an_exception_while_looking_for_problems_does_not_end_sailord(monkeypatch) -> None:
    looks = []

    def fails(_: Any) -> None:
        looks.append(1)
        if len(looks) == 2:
            raise asyncio.CancelledError
        raise KeyError("a view that cannot be made")

    monkeypatch.setattr(problems, "look_at_problems", fails)
    monkeypatch.setattr(problems, "LOOK_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await problems.watch_problems(served(Parts(FIRST)))
