"""Preemption webhook: notices as signed JSON, as Pub/Sub pushes, or from Alertmanager.

A notice is stored under the sender's id before it is answered, so that a repeated message has no
second effect. Pub/Sub pushes come from a log sink on preemptions.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import structlog
from aiohttp import web

from agents.protocol.records import Order, OrderKind
from sailord.api.answers.responses import answer, refusal
from sailord.api.answers.types import Accepted
from sailord.api.handlers.bodies import check_id, check_moment, read_object
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.orders import OTHER_ID
from sailord.api.handlers.webhook_message import ALERTS_MAX, SEE, MessageForm, read_message
from sailord.core.model.state import State
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("sailord.api")

NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,252}\Z")
PREEMPTED = "compute.instances.preempted"
SENDERS: dict[MessageForm, str] = {
    "plain": "the preemption webhook, signed",
    "pubsub": "the preemption webhook, Pub/Sub",
    "alertmanager": "the preemption webhook, Alertmanager",
}
"""Who sent a notice. Each form has one secret or account, so that no more is known."""


async def preemption(request: web.Request) -> web.Response:
    """Take preemption notices, and withdrawals of notices."""
    api = request.app[CONTEXT]
    form, body = await read_message(request)
    if form == "pubsub":
        orders = _from_pubsub(body)
    elif form == "alertmanager":
        orders = _from_alerts(body)
    else:
        orders = [await _from_plain(request)]
    orders = [_from(SENDERS[form], order) for order in orders]
    given = await asyncio.gather(*(api.gateway.give_order(order) for order in orders))
    # Providers tell of machines that are none of this cluster's nodes, too.
    nodes = _names(api.cluster.led_parts) if api.cluster.state.term is not None else frozenset()
    for order, is_new in zip(orders, given, strict=True):
        if is_new == "new" and order.target in nodes:
            api.cluster.tell_order(order)
    api.cluster.read_store_soon()
    if "other" in given:
        return refusal(409, OTHER_ID)
    return answer(Accepted(len(orders), given.count("new")), status=202)


def _names(parts: Iterable[State]) -> frozenset[str]:
    """Return the names and ids of all nodes."""
    records = (node.record for part in parts for node in part.nodes.values())
    return frozenset(each for record in records for each in (record.id, record.name))


def _from(sender: str, notice: Order) -> Order:
    """Add to the reason who sent a notice, as an operator's order names its giver."""
    reason = notice.reason or f"{notice.kind} was ordered"
    log.info("notice", by=sender, order=notice.kind, target=notice.target, reason=notice.reason)
    return replace(notice, reason=f"{reason} (by {sender})")


async def _from_plain(request: web.Request) -> Order:
    kinds: dict[str, type] = {
        "id": str, "node": str, "leaves_at": float, "withdrawn": bool, "reason": str,
    }  # fmt: skip
    body = await read_object(request, kinds, ("id", "node"))
    check_id(body["id"], "body: id")
    kind: OrderKind = "withdraw" if body.get("withdrawn") else "preempt"
    leaves_at = body.get("leaves_at")
    check_moment(leaves_at, "body: leaves_at")
    # A withdrawal may carry the notice's id, but is a different order.
    id_ = f"plain:{body['id']}" + (":withdrawn" if kind == "withdraw" else "")
    return _order(id_, kind, body["node"], leaves_at, body.get("reason", ""))


def _from_pubsub(body: dict[str, Any]) -> list[Order]:
    try:
        message = body["message"]
        entry = json.loads(base64.b64decode(message["data"], validate=True))
        method = entry["protoPayload"]["methodName"]
        name, id_ = entry["protoPayload"]["resourceName"], message["messageId"]
    except (KeyError, TypeError, ValueError, binascii.Error, RecursionError):
        raise InputError(Problem("body", "is not a push of a log entry", SEE)) from None
    if method != PREEMPTED:
        return []  # Acknowledged, or Pub/Sub would send it again.
    return [_order(f"pubsub:{id_}", "preempt", str(name).rpartition("/")[2], None, method)]


def _from_alerts(body: dict[str, Any]) -> list[Order]:
    alerts = body.get("alerts")
    if not isinstance(alerts, list) or len(alerts) > ALERTS_MAX:
        raise InputError(Problem("body: alerts", f"is not a list of at most {ALERTS_MAX}", SEE))
    orders = {}
    for alert in alerts:
        try:
            labels, status = alert["labels"], alert["status"]
            node = labels.get("node") or labels["instance"].rpartition(":")[0]
            id_ = f"alert:{alert['fingerprint']}:{alert['startsAt']}:{status}"
            name = str(labels.get("alertname", ""))
        except (KeyError, TypeError, AttributeError):
            raise InputError(
                Problem("body: alerts", "an alert has no node", "give it the label node")
            ) from None
        if not isinstance(node, str) or status not in ("firing", "resolved"):
            raise InputError(Problem("body: alerts", "an entry is not an alert", SEE))
        order = _order(id_, "withdraw" if status == "resolved" else "preempt", node, None, name)
        orders[order.id] = order
    return list(orders.values())


def _order(id_: str, kind: OrderKind, node: str, leaves_at: float | None, reason: str) -> Order:
    if not NODE.match(node):
        raise InputError(Problem("body", "invalid node name", "give the name of a node"))
    # The hash is a safe key, whatever characters the sender's id has.
    key = f"hook-{hashlib.sha256(id_.encode('utf-8', 'replace')).hexdigest()[:32]}"
    reason = reason[:200].encode("utf-8", "replace").decode()
    return Order(key, kind, node, leaves_at, reason, of_notice=kind == "withdraw")
