"""Agents are asked for measured steps on request only, and for all watchers at once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from agents.protocol.codec import encode
from agents.protocol.records import JobId, KeptStep, KeptSteps
from agents.rpc.client import CallFailed
from sailord.api.handlers import timeline
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.timeline import (
    AGENT_S,
    FRESH_S,
    MEASURED,
    RANKS_MAX,
    MeasuredSchedules,
    show_timeline,
)
from sailord.core.sharing.parts import whole
from tests.sailord.api.answers.test_chosen_job import OTHER, shared
from tests.sailord.core.states import A, B, C, D, generation, state

STEP = KeptStep(8, 100.0, 5.0, (("F", 0.5, 1.0, 0),), ())
G = generation(A, B)


@dataclass
class Agents:
    """Agents that answer, or not."""

    silent: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)

    async def call(self, address: str, method: str, path: str, *, timeout_s: float) -> bytes:
        assert (method, timeout_s) == ("GET", AGENT_S)
        self.asked.append(path)
        await asyncio.sleep(0)
        if path.rpartition("/")[2] in self.silent:
            raise CallFailed(f"{address} timed out")
        return encode(KeptSteps((STEP,), 101.0))


def predicted(*nodes: str) -> dict[str, Any]:
    groups = [{"stage": rank, "rank": rank, "node": id_} for rank, id_ in enumerate(nodes)]
    return {"pipelines": [{"numbers": [0], "groups": groups}]}


def api(agents: Agents) -> Any:
    """What the handler reads of the context."""
    return SimpleNamespace(cluster=SimpleNamespace(last_led=state(), agents=agents))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(timeline, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


async def test_all_watchers_share_one_look_at_the_agents(clock: SimpleNamespace) -> None:
    agents, kept = Agents(), MeasuredSchedules()

    async def look(number: int = G.number) -> Any:
        return await kept.of(api(agents), replace(G, number=number), predicted(A, B))

    found = await asyncio.gather(*(look() for _ in range(9)))
    assert {each.step for each in found} == {8}
    assert agents.asked == [f"/v1/steps/{G.job}/{G.number}/{rank}" for rank in (0, 1)]
    clock.now += FRESH_S - 1
    await look()
    assert len(agents.asked) == 2
    clock.now += 1
    await look()
    assert len(agents.asked) == 4
    await look(G.number + 1)
    assert len(agents.asked) == 6, "what another generation measured is shown"


@pytest.mark.usefixtures("clock")
async def test_jobs_that_share_the_cluster_keep_separate_measured_schedules() -> None:
    agents, kept = Agents(), MeasuredSchedules()
    for _ in range(3):
        for job in ("one", "two"):
            await kept.of(api(agents), replace(G, job=JobId(job)), predicted(A))
    assert agents.asked == [f"/v1/steps/{job}/{G.number}/0" for job in ("one", "two")]


async def test_a_job_beside_the_first_has_a_measured_schedule_too() -> None:
    parts = shared()
    second = parts.others[OTHER].active
    assert second is not None
    assert second.generation is not None
    cluster = SimpleNamespace(
        last_led=whole(parts), agents=Agents(), led_of=lambda job: parts.of_job(JobId(job))
    )
    sha = second.generation.plan
    # That of another job with the same plan is of another model.
    schedules = {(JobId("one"), sha): predicted(A), (OTHER, sha): predicted(C, D)}
    app = {CONTEXT: SimpleNamespace(cluster=cluster, timelines_seen=schedules)}
    request: Any = SimpleNamespace(
        app={**app, MEASURED: MeasuredSchedules()}, match_info={"job": OTHER}, query={}
    )
    body = (await show_timeline(request)).body
    assert isinstance(body, bytes)
    found = json.loads(body)
    assert found["sha256"] == sha
    assert len(found["timeline"]["pipelines"][0]["groups"]) == 2
    assert found["measured"]["step"] == STEP.step


async def test_silent_and_lost_nodes_leave_their_rows_out() -> None:
    agents = Agents(silent=("1",))
    found = await MeasuredSchedules().of(api(agents), G, predicted(A, B, "gone.1"))
    assert found is not None
    first, silent, gone = found.pipelines[0].groups
    assert first.passes == STEP.passes
    assert "timed out" in silent.why_none
    assert gone.why_none == "its node is lost"


async def test_no_more_than_ranks_max_ranks_are_asked() -> None:
    agents = Agents()
    found = await MeasuredSchedules().of(api(agents), G, predicted(*[A] * (RANKS_MAX + 1)))
    assert len(agents.asked) == RANKS_MAX
    assert found is not None
    assert found.pipelines[0].groups[-1].why_none == "was not asked"
