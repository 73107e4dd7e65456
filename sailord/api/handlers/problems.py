"""Watches the problems of all jobs, so that it is known since when each one exists."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from agents.rpc.strangers import StrangerLimits
from sailord.api.answers import render, types
from sailord.api.answers.problems import OpenProblem, Service, problems_of
from sailord.api.handlers.capacity import glance_of
from sailord.api.handlers.context import ApiContext

log = structlog.get_logger("sailord.api")
HOUR_S = 3600.0
LOOK_S = 10.0


async def watch_problems(api: ApiContext) -> None:
    """Note every ``LOOK_S`` which problems stand, also while no client asks."""
    while True:
        try:
            look_at_problems(api)
        except Exception:  # A fault of ours: it costs "since when", and must not end sailord.
            log.exception("problems cannot be looked at")
        await asyncio.sleep(LOOK_S)


def look_at_problems(api: ApiContext) -> None:
    """Note which problems stand now, of whichever job."""
    state, parts, now = api.cluster.last_led, api.cluster.led_parts, api.clock.now()
    service, nodes = service_of(api), render.nodes_view(state, parts=parts).nodes
    paused, stuck = render.paused_view(state), render.stuck_view(*parts)
    found: list[OpenProblem] = []
    for part in parts:
        job = render.active_view(part, api.cluster.step_rate_of(None), None, {}, {}, now)
        found += problems_of(service, job, nodes, now, paused, api.cluster.risks(part), stuck)
    since_of(api, found)
    api.first_seen.keep_only(found)


def since_of(api: ApiContext, problems: Iterable[OpenProblem]) -> tuple[float, ...]:
    """Return since when each problem stands."""
    led_since, now = api.cluster.last_led.led_since, api.clock.now()
    return tuple(api.first_seen.since(each, led_since, now) for each in problems)


def service_of(api: ApiContext) -> Service:
    """Return how sailord itself fares."""
    return Service(
        has_leader=api.cluster.leader is not None,
        store=_store_view(api),
        unheard=tuple(api.cluster.outbox.failing.values()),
        unreadable=dict(sorted(api.own_gateway.unreadable.found.items())),
        refusals=_refusals_of(api.strangers),
        capacity=glance_of(api),
        lost=api.cluster.lost_nodes.of(api.clock.now()),
    )


def _refusals_of(strangers: StrangerLimits) -> types.Refusals:
    at, address, why = strangers.last or (None, "", "")
    total = {cause: count for cause, count in strangers.by_cause().items() if count}
    return types.Refusals(strangers.count_within(HOUR_S), total, at, address, why)


def _store_view(api: ApiContext) -> types.StoreView:
    store = api.cluster.store
    trouble = store.refused_write if store.is_available else store.error
    return types.StoreView(store.is_available, store.unavailable_since, trouble)
