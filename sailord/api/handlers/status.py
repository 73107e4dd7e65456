"""Handlers of liveness, readiness, metrics and the status overview."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from aiohttp import web

from agents.protocol.records import JobId
from sailord.api.answers import render, types
from sailord.api.answers.goodput import usd_per_hour_of
from sailord.api.answers.last_told import last_told
from sailord.api.answers.losses import needed_nodes
from sailord.api.answers.problems import problems_of
from sailord.api.answers.responses import answer, refusal
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.metrics import metrics_text
from sailord.api.handlers.plans import plan_of
from sailord.api.handlers.problems import service_of, since_of
from simulator.documents.problems import Problem, nearest

EARLIER_S, EARLIER_S_MIN = 600.0, 60.0
"""Present speed and loss are shown beside those of 10 min ago; those of a younger job beside its
first ones, once these are 1 min old."""


async def livez(request: web.Request) -> web.Response:
    """Answer whether the event loop runs."""
    del request
    return answer(types.Live(live=True))


async def readyz(request: web.Request) -> web.Response:
    """Answer whether a leader is elected and the store is available."""
    api = request.app[CONTEXT]
    leader, leads = api.cluster.leader, api.cluster.state.term is not None
    if not api.cluster.store.is_available:
        return refusal(503, Problem("the store", "is unavailable", "check that it runs"))
    # The record may still be from before this process restarted.
    if leader is None or (leader.address == api.config.address and not leads):
        cure = f"retry in about {api.config.options.lease_s:g} s"
        return refusal(503, Problem("sailord", "no leader elected yet", cure))
    return answer(types.Ready(ready=True, leads=leads))


async def metrics(request: web.Request) -> web.Response:
    """Export metrics for Prometheus."""
    api = request.app[CONTEXT]
    # A new leader has read no plan yet, and an alert compares steps with the prediction.
    _, about = await plan_of(api, api.cluster.last_led)
    text = metrics_text(api, about)
    return web.Response(text=text, content_type="text/plain", charset="utf-8")


async def status(request: web.Request) -> web.Response:
    """Summarize the cluster, a job that runs and the store."""
    api = request.app[CONTEXT]
    state, now = api.cluster.last_led, api.clock.now()
    chosen = JobId(request.query["job"]) if "job" in request.query else None
    part = state if chosen is None else api.cluster.led_of(chosen)
    parts = api.cluster.led_parts
    if chosen is not None and chosen not in state.jobs:
        cure = nearest(chosen[:64], state.jobs)
        return refusal(404, Problem(chosen[:64] or "job=", "no such job", cure))
    if chosen is not None and (part.active is None or part.active.job != chosen):
        return refusal(404, Problem(f"job {chosen}", "does not run", "see `sailorctl jobs`"))
    plan, about = await plan_of(api, part)
    leader, outbox = api.cluster.leader, api.cluster.outbox
    step_rate = api.cluster.step_rate_of(chosen)
    safe = api.cluster.safe_point(chosen)
    feed = api.cluster.feed.kept
    curve = api.curves.of(None if part.active is None else part.active.job)
    earlier = curve.before(now - EARLIER_S) or curve.first(now - EARLIER_S_MIN)
    job = render.active_view(part, step_rate, plan, about, outbox.at_of, now, safe, feed, earlier)
    if job is not None:
        job = replace(job, needed=needed_nodes(part, api.cluster.following))
    service = service_of(api)
    problems = problems_of(
        service,
        job,
        render.nodes_view(state, parts=parts).nodes,
        now,
        render.paused_view(state),
        api.cluster.risks(part),
        render.stuck_view(*parts),
    )
    return answer(
        types.Status(
            cluster=api.config.cluster_name,
            at=now,
            leads=api.cluster.state.term is not None,
            term=api.cluster.state.term,
            leader=None
            if leader is None
            else types.LeaderView(leader.host, leader.address, api.cluster.state.led_since),
            store=service.store,
            job=job,
            **render.queue_view(state),
            unsound=render.unsound_view(state),
            nodes=render.counts_view(state),
            leaving=render.leaving_view(*parts),
            capacity=service.capacity,
            unreadable=service.unreadable,
            running=render.running_view(parts),
            refusals=service.refusals,
            unheard=service.unheard,
            problems=tuple(each.text for each in problems),
            problems_since=since_of(api, problems),
            usd_per_hour=usd_per_hour_of(api.goodput.ledger),
            last_order=last_told(feed, "order"),
            receivers=tuple(
                f"{urlsplit(each.url).hostname} ({each.format})"
                for each in api.config.webhooks.receivers
            ),
        )
    )
