"""Preemption webhook: notices as signed JSON, as Pub/Sub pushes, or from Alertmanager.

A notice is stored under the sender's id before it is answered, so that a repeated message has no
second effect. Pub/Sub pushes come from a log sink on preemptions.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import re
import time
from typing import Any, Literal

from aiohttp import web

from agents.protocol.records import Order, OrderKind
from agents.rpc.strangers import note_authenticated
from agents.rpc.unsigned_bodies import read_unsigned
from sailord.api.access.key_set import KeySet
from sailord.api.access.webhook_tokens import TokenError, check_token, key_id_of
from sailord.api.answers.responses import Refusal, answer, refusal, too_many
from sailord.api.answers.types import Accepted
from sailord.api.handlers.bodies import check_id, check_moment, read_object
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.orders import OTHER_ID
from sailord.config import Webhooks
from sailord.notify.webhook_signature import SIGNATURE_HEADER, sign
from simulator.documents.problems import InputError, Problem

AGE_S_MAX = 300.0
_SIGNATURE = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})\Z", re.ASCII)
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,252}\Z")
ALERTS_MAX = 500
SEE = "docs/api.md describes the forms of webhooks"
NO_WEBHOOKS = "no webhooks are configured here ([webhooks] in sailord.toml)"
Form = Literal["plain", "pubsub", "alertmanager"]
PREEMPTED = "compute.instances.preempted"


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
    given = await asyncio.gather(*(api.gateway.give_order(order) for order in orders))
    api.store_changed.set()
    if "other" in given:
        return refusal(409, OTHER_ID)
    return answer(Accepted(len(orders), given.count("new")), status=202)


async def read_message(request: web.Request) -> tuple[Form, dict[str, Any]]:
    """Authenticate the sender as far as headers allow, and only then read the body."""
    api = request.app[CONTEXT]
    hooks, header = api.config.webhooks, request.headers.get(SIGNATURE_HEADER)
    kind: Form = "plain"
    if hooks.secret is None and hooks.alertmanager_token is None and api.pubsub_keys is None:
        raise _unauthenticated(NO_WEBHOOKS)
    if header is not None:
        await _check_signature(request, hooks.secret, header)
    else:
        kind = await _bearer_form(hooks, api.pubsub_keys, request.headers.get("Authorization", ""))
    note_authenticated(request)
    # Only who is authenticated counts, so that a stranger cannot use up anybody's share.
    if not api.webhook_budgets.of(kind).take():
        raise too_many("messages")
    return kind, {} if kind == "plain" else _object(await read_unsigned(request))


async def _check_signature(request: web.Request, secret: bytes | None, header: str) -> None:
    """Check form and age of the signature before the body arrives, then the signature."""
    form = _SIGNATURE.match(header)
    if secret is None or form is None:
        raise _unauthenticated("malformed signature, or no secret is configured")
    if abs(time.time() - float(form[1])) > AGE_S_MAX:
        why = f"the signature is more than {AGE_S_MAX:g} s old, or a clock is wrong"
        raise _unauthenticated(why)
    body = await read_unsigned(request)
    if not hmac.compare_digest(sign(secret, body, float(form[1])), form[0]):
        raise _unauthenticated("the signature is wrong")


def _unauthenticated(why: str) -> Refusal:
    return Refusal(401, Problem("the sender", why, SEE))


async def _bearer_form(hooks: Webhooks, keys: KeySet | None, header: str) -> Form:
    kind, _, token = header.partition(" ")
    if kind != "Bearer" or not token:
        raise _unauthenticated(f"neither {SIGNATURE_HEADER} nor a bearer token was sent")
    if token.count(".") == 2 and keys is not None:
        assert hooks.pubsub_audience is not None
        assert hooks.pubsub_email is not None
        try:
            known = await keys.find(key_id_of(token))
            check_token(token, known, audience=hooks.pubsub_audience, email=hooks.pubsub_email)
        except TokenError as error:
            raise _unauthenticated(str(error)) from None
        return "pubsub"
    expected = (hooks.alertmanager_token or "").encode()
    if not expected or not hmac.compare_digest(token.encode("utf-8", "replace"), expected):
        raise _unauthenticated("the token is wrong")
    return "alertmanager"


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InputError(Problem("body", "is not a JSON object", SEE))
    return value


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
    return Order(key, kind, node, leaves_at, reason[:200].encode("utf-8", "replace").decode())
