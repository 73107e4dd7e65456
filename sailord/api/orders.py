"""Operator orders: read from a request, rejected if they would have no effect, then stored."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Any

from aiohttp import web

from agents.protocol.records import Order, OrderKind
from sailord.api.bodies import check_id, check_moment, read_object
from sailord.api.context import CONTEXT, ApiContext
from sailord.api.responses import answer, refusal
from sailord.api.types import Taken
from sailord.core.order_validation import objection
from simulator.documents.problems import Problem

APPLIED_WITHIN_S = 2.0
"""How long an answer waits until the controller has read what was just stored."""
REASON_MAX = 500
OTHER_ID = Problem(
    "id", "was used with another order or node", "use a new id for each order (idempotency key)"
)


async def handle_order(request: web.Request, target: str) -> web.Response:
    """Handle ``POST .../{order}`` for a job or a node."""
    kinds: dict[str, type] = {"id": str, "reason": str, "leaves_at": float}
    body = await read_object(request, kinds, ())
    order = read_order(request.match_info["order"], target, body)
    return await store_order(request.app[CONTEXT], order)


def read_order(kind: str, target: str, body: dict[str, Any]) -> Order:
    """Build an order; raises ``InputError`` for an invalid id or time."""
    id_ = body.get("id") or uuid.uuid4().hex
    check_id(id_, "id")
    check_moment(body.get("leaves_at"), "leaves_at")
    checked: OrderKind = kind  # type: ignore[assignment] # the route's pattern allows no other
    reason = body.get("reason", "")[:REASON_MAX]
    return Order(id_, checked, target, body.get("leaves_at"), reason)


async def store_order(api: ApiContext, order: Order) -> web.Response:
    """Store an order; refuse one that would change nothing, and say what would."""
    useless = objection(api.state, order)
    if useless is not None:
        return refusal(409, useless)
    given = await api.gateway.give_order(order)
    if given == "other":
        return refusal(409, OTHER_ID)
    api.store_changed.set()
    if api.state.term is not None:
        # The next order of the same operator is validated against this one.
        await wait_until(lambda: order.id in api.state.known_orders)
    return answer(Taken(order.id, given == "new"), status=202)


async def wait_until(is_known: Callable[[], bool]) -> None:
    """Give the controller time to read what has just been stored."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(APPLIED_WITHIN_S):
            while not is_known():
                await asyncio.sleep(0.01)
