"""Operator orders: read from a request, rejected if they would have no effect, then stored."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import structlog
from aiohttp import web

from agents.protocol.records import JobId, NodeId, Order, OrderKind
from sailord.api.access.callers import caller_of
from sailord.api.answers.losses import needed_nodes
from sailord.api.answers.queue_place import after_order
from sailord.api.answers.responses import answer, refusal
from sailord.api.answers.types import Taken
from sailord.api.handlers.bodies import check_id, check_moment, read_object
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.cluster_records import what_is_ordered
from sailord.core.order_validation import why_without_effect
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("sailord.api")

APPLIED_WITHIN_S = 2.0
"""How long an answer waits until the controller has read what was just stored."""
REASON_MAX = 500
NOTICE_S_MAX = 86_400.0
NEEDED: Mapping[OrderKind, str] = {
    "drain": "there is no plan without it: the job trains on there until it can use another",
    "preempt": "there is no plan without it: once it ends, the job waits for another",
}
"""What follows an order about a node that the job cannot do without."""
OTHER_ID = Problem(
    "id", "was used with another order or node", "use a new id for each order (idempotency key)"
)


async def handle_order(request: web.Request, target: str) -> web.Response:
    """Handle ``POST .../{order}`` for a job or a node."""
    kinds: dict[str, type] = {"id": str, "reason": str, "leaves_at": float, "notice_s": float}
    body, api = await read_object(request, kinds, ()), request.app[CONTEXT]
    if (notice_s := body.get("notice_s")) is not None:
        if "leaves_at" in body:
            raise InputError(Problem("notice_s", "is given beside leaves_at", "give one of them"))
        if not 0 <= notice_s <= NOTICE_S_MAX:
            cure = f"give 0 to {NOTICE_S_MAX:,.0f} s"
            raise InputError(Problem("notice_s", "is out of range", cure))
        # By our clock: the sender's may differ.
        body["leaves_at"] = api.clock.now() + notice_s
    order = named(request, read_order(request.match_info["order"], target, body))
    return await store_order(api, order)


def read_order(kind: str, target: str, body: dict[str, Any]) -> Order:
    """Build an order; raises ``InputError`` for an invalid id or time."""
    id_ = body.get("id") or uuid.uuid4().hex
    check_id(id_, "id")
    check_moment(body.get("leaves_at"), "leaves_at")
    checked: OrderKind = kind  # type: ignore[assignment] # the route's pattern allows no other
    reason = body.get("reason", "")[:REASON_MAX]
    return Order(id_, checked, target, body.get("leaves_at"), reason)


def named(request: web.Request, order: Order) -> Order:
    """Add to the reason who gave the order; on this host it is the user's name."""
    caller = caller_of(request)
    if caller is None:
        return order
    about = {"order": order.kind, "target": order.target, "id": order.id}
    log.info("order", by=caller.name, role=caller.role, reason=order.reason, **about)
    reason = order.reason or f"{order.kind} was ordered"
    return replace(order, reason=f"{reason} (by {caller.name})")


def tell_given(request: web.Request, said: str, job: JobId | None = None) -> None:
    """Tell of an order that leaves no record, and who gave it: log, event feed, a job's history."""
    api, caller = request.app[CONTEXT], caller_of(request)
    if caller is not None:
        log.info("order", by=caller.name, role=caller.role, order=said, target=job)
        said += f" (by {caller.name})"
    api.cluster.tell_given(said, job)


async def store_order(api: ApiContext, order: Order, then: str = "") -> web.Response:
    """Store an order; refuse one that would change nothing, and say what would.

    ``then``: what follows, if the caller knows it.
    """
    useless = why_without_effect(api.cluster.state_of(order.target), order)
    if useless is not None:
        return refusal(409, useless)
    if api.cluster.state.term is not None and order.id in api.cluster.state.known_orders:
        # It may have been carried out and deleted: stored again, the next leader would repeat it.
        before = await api.gateway.stored_order(order.id)
        if before is not None and what_is_ordered(before) != what_is_ordered(order):
            return refusal(409, OTHER_ID)
        return answer(Taken(order.id, False), status=202)
    if order.kind in NEEDED and _is_needed(api, order.target):
        then = NEEDED[order.kind]  # Asked before the order changes what plans may use.
    given = await api.gateway.give_order(order)
    if given == "other":
        return refusal(409, OTHER_ID)
    if given == "new":
        api.cluster.tell_order(order)
    api.cluster.read_store_soon()
    if api.cluster.state.term is not None:
        # The next order of the same operator is validated against this one.
        await wait_until(lambda: order.id in api.cluster.state.known_orders)
    then = then or after_order(api.cluster.last_led, order.kind, JobId(order.target))
    return answer(Taken(order.id, given == "new", then), status=202)


def _is_needed(api: ApiContext, target: str) -> bool:
    """Return whether a job has no plan without the node of this name or id."""
    node = api.cluster.last_led.nodes.get(NodeId(target))
    name = target if node is None else node.record.name
    parts = api.cluster.led_parts
    return any(name in needed_nodes(part, api.cluster.following) for part in parts)


async def wait_until(is_known: Callable[[], bool]) -> None:
    """Give the controller time to read what has just been stored."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(APPLIED_WITHIN_S):
            while not is_known():
                await asyncio.sleep(0.01)
