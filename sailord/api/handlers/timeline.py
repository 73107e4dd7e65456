"""Handler of a job's schedule: one step as predicted, and as its ranks have measured it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agents.protocol.codec import WireError, decode
from agents.protocol.records import GenerationRecord, JobId, KeptSteps, NodeId
from agents.rpc.client import CallFailed
from sailord.api.answers.responses import Refusal, answer
from sailord.api.answers.timeline import MeasuredSchedule, TimelineView, measured_schedule
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.api.handlers.jobs import job_of
from sailord.api.handlers.plans import PLANS_SEEN_MAX
from sailord.planning.messages import PlanRequest
from simulator.documents.problems import Problem

TIMELINE_S = 30.0
AGENT_S = 2.0
"""An agent that does not answer within this time leaves its row empty."""
RANKS_MAX = 64
"""Most ranks that are asked."""
FRESH_S = 5.0
"""Agents are asked at most once in this time, for all watchers together."""


@dataclass(eq=False)
class MeasuredSchedules:
    """The schedules that were measured last, read from the agents for all watchers at once."""

    _found: dict[JobId, tuple[int, float, MeasuredSchedule | None]] = field(default_factory=dict)
    """Of each job: the generation that it is of, and when it was read."""
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def of(
        self, api: ApiContext, generation: GenerationRecord, predicted: Mapping[str, Any]
    ) -> MeasuredSchedule | None:
        """Return a step of the generation; ``None``: none was measured."""
        async with self._reading:
            number, read_at, found = self._found.get(generation.job, (None, 0.0, None))
            if number != generation.number or time.monotonic() >= read_at + FRESH_S:
                found = measured_schedule(predicted, await _ask_agents(api, generation, predicted))
                now = time.monotonic()
                fresh = {job: each for job, each in self._found.items() if now < each[1] + FRESH_S}
                self._found = {**fresh, generation.job: (generation.number, now, found)}
            return found


MEASURED = web.AppKey("measured", MeasuredSchedules)


async def show_timeline(request: web.Request) -> web.Response:
    """Show the schedule of one iteration of the job's plan, pass by pass.

    As predicted, and as the first rank of each stage group has measured it in one of the last
    steps. With ``predicted=false`` the predicted one is left out.
    """
    api, job = request.app[CONTEXT], job_of(request)
    if job.generation is None:
        cure = f"sailorctl why {job.id} says what the job waits for"
        raise Refusal(404, Problem(job.id, "has no plan yet", cure))
    id_, sha, why_none = JobId(job.id), job.generation.plan, ""
    predicted = api.timelines_seen.get((id_, sha))
    if predicted is None:
        predicted, why_none = await _predict(api, id_, sha)
        if predicted is not None:
            last = list(api.timelines_seen.items())[1 - PLANS_SEEN_MAX :]
            api.timelines_seen = {**dict(last), (id_, sha): predicted}
    active, measured = api.cluster.led_of(job.id).active, None
    generation = None if active is None or active.job != job.id else active.generation
    if predicted is not None and generation is not None and generation.plan == sha:
        measured = await request.app[MEASURED].of(api, generation, predicted)
    if request.query.get("predicted") == "false":
        predicted, why_none = None, "it was not asked for"
    return answer(TimelineView(sha, predicted, why_none, measured))


async def _predict(api: ApiContext, job: JobId, sha: str) -> tuple[dict[str, Any] | None, str]:
    spec, text = await api.gateway.read_spec(job), await api.gateway.read_plan(job, sha)
    led = api.cluster.led_of(job)
    generation = led.generations.get(job)
    if led.active is not None and led.active.job == job:
        generation = led.active.generation
    if spec is None or text is None or generation is None:
        return None, "the plan is not in the store any more"
    nodes = api.cluster.last_led.nodes
    members = tuple(nodes[id_].record for id_ in generation.members if id_ in nodes)
    config = api.config
    found = await api.cluster.planner.ask_timeline(
        PlanRequest(
            spec, config.cluster_file, config.profiles, members, text, members,
            links=config.measured_links,
        ),
        timeout_s=TIMELINE_S,
    )  # fmt: skip
    return (None, str(found)) if isinstance(found, str) else (found, "")


async def _ask_agents(
    api: ApiContext, generation: GenerationRecord, predicted: Mapping[str, Any]
) -> dict[int, KeptSteps | str]:
    """Ask for the kept steps of the first rank of each stage group, or why there are none."""

    async def ask(rank: int, id_: NodeId) -> KeptSteps | str:
        node = api.cluster.last_led.nodes.get(id_)
        if node is None or not node.record.address:
            return "its node is lost"
        path = f"/v1/steps/{generation.job}/{generation.number}/{rank}"
        agents = api.cluster.agents
        try:
            said = await agents.call(node.record, "GET", path, timeout_s=AGENT_S)
            return decode(KeptSteps, said)
        except (CallFailed, WireError) as error:
            return f"{node.record.name}: {error}"

    groups = [group for each in predicted["pipelines"] for group in each["groups"]]
    nodes = {group["rank"]: NodeId(group["node"]) for group in groups[:RANKS_MAX]}
    return dict(zip(nodes, await asyncio.gather(*map(ask, nodes, nodes.values())), strict=True))
