"""Warnings from outside: signed JSON, Pub/Sub's push of a log sink, and Alertmanager's form.

What is accepted stands in the store under the sender's own id before it is answered, so that a
message that comes twice has one effect.
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

from agents.protocol.records import Intent, IntentKind
from sailord.api.app import API, answer, refusal, too_many
from sailord.api.jobs_and_nodes import ID, LEAVES_MAX, NAMES, OTHER_ID, read_object
from sailord.api.load_limits import read_unsigned
from sailord.api.types import Accepted
from sailord.api.webhook_tokens import TokenError, check_token, read_keys
from sailord.config import Webhooks
from simulator.documents.problems import InputError, Problem

SIGNATURE_HEADER = "Sailor-Webhook"
AGE_S_MAX = 300.0
_SIGNATURE = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})\Z", re.ASCII)
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,252}\Z")
ALERTS_MAX = 500
SEE = "docs/api.md tells the forms of webhooks"
Form = Literal["plain", "pubsub", "alertmanager"]
PREEMPTED = "compute.instances.preempted"


class Unknown(Exception):  # noqa: N818 - not an error of ours: the sender is answered with it
    """The sender is not one that we listen to."""


class Refused(Exception):  # noqa: N818 - as above
    """A message is not looked at; its sender is answered so."""

    def __init__(self, response: web.Response) -> None:
        super().__init__(response.status)
        self.response = response


def sign(secret: bytes, body: bytes, at: float) -> str:
    """The header's value by which a body is known; the same form for webhooks out."""
    moment = str(int(at))
    mac = hmac.new(secret, moment.encode() + b"." + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={mac}"


async def preemption(request: web.Request) -> web.Response:
    """Machines will go away, or will not after all."""
    api = request.app[API]
    try:
        form, body = await read_message(request)
    except Refused as error:
        return error.response
    if form == "pubsub":
        intents = _from_pubsub(body)
    elif form == "alertmanager":
        intents = _from_alerts(body)
    else:
        intents = [await _from_plain(request)]
    given = await asyncio.gather(*(api.gateway.give_intent(intent) for intent in intents))
    api.woken.set()
    if "other" in given:
        return refusal(409, OTHER_ID)
    return answer(Accepted(len(intents), given.count("new")), status=202)


async def read_message(request: web.Request) -> tuple[Form, dict[str, Any]]:
    """What somebody sends whom we know; raises :class:`Refused`."""
    api = request.app[API]
    if not api.allows(request.remote or ""):
        raise Refused(too_many("messages"))
    try:
        return await _read_known(request, api.config.webhooks)
    except Unknown as error:
        raise Refused(refusal(401, Problem("the sender", str(error), SEE))) from None


async def _read_known(request: web.Request, hooks: Webhooks) -> tuple[Form, dict[str, Any]]:
    """Who sends, by what it shows; nothing of the body is believed, or waited for, before."""
    header = request.headers.get(SIGNATURE_HEADER)
    if header is not None:
        form = _signature_form(hooks.secret, header)
        _check_signature(hooks.secret, await read_unsigned(request), form)
        return "plain", {}
    kind = await _bearer_form(hooks, request.headers.get("Authorization", ""))
    return kind, _object(await read_unsigned(request))


async def _bearer_form(hooks: Webhooks, header: str) -> Form:
    kind, _, token = header.partition(" ")
    if kind != "Bearer" or not token:
        raise Unknown(f"neither {SIGNATURE_HEADER} nor a token was sent")
    if token.count(".") == 2 and hooks.pubsub_keys is not None:
        assert hooks.pubsub_audience is not None
        assert hooks.pubsub_email is not None
        try:
            keys = await asyncio.to_thread(read_keys, hooks.pubsub_keys)
            check_token(
                token, keys, audience=hooks.pubsub_audience, email=hooks.pubsub_email,
                at=time.time(),
            )  # fmt: skip
        except TokenError as error:
            raise Unknown(str(error)) from None
        return "pubsub"
    expected = (hooks.alertmanager_token or "").encode()
    if not expected or not hmac.compare_digest(token.encode("utf-8", "replace"), expected):
        raise Unknown("the token is wrong")
    return "alertmanager"


def _signature_form(secret: bytes | None, header: str) -> re.Match[str]:
    """What can be said of a signature before the body is there."""
    form = _SIGNATURE.match(header)
    if secret is None or form is None:
        raise Unknown("the signature is malformed, or no secret is configured")
    if abs(time.time() - float(form[1])) > AGE_S_MAX:
        raise Unknown("the signature is too old, or a clock is wrong")
    return form


def _check_signature(secret: bytes | None, body: bytes, form: re.Match[str]) -> None:
    if secret is None or not hmac.compare_digest(sign(secret, body, float(form[1])), form[0]):
        raise Unknown("the signature is wrong")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InputError(Problem("body", "is no JSON object", SEE))
    return value


async def _from_plain(request: web.Request) -> Intent:
    kinds: dict[str, type] = {
        "id": str, "node": str, "leaves_at": float, "withdrawn": bool, "reason": str,
    }  # fmt: skip
    body = await read_object(request, kinds, ("id", "node"))
    if not ID.match(body["id"]):
        raise InputError(Problem("body: id", "is no name", NAMES))
    kind: IntentKind = "withdraw" if body.get("withdrawn") else "preempt"
    leaves_at = body.get("leaves_at")
    if leaves_at is not None and not 0 < leaves_at < LEAVES_MAX:
        raise InputError(Problem("body: leaves_at", "is no moment", "give seconds since 1970"))
    # What takes a notice back may bear that notice's id, and is another order all the same.
    id_ = f"plain:{body['id']}" + (":withdrawn" if kind == "withdraw" else "")
    return _intent(id_, kind, body["node"], leaves_at, body.get("reason", ""))


def _from_pubsub(body: dict[str, Any]) -> list[Intent]:
    try:
        message = body["message"]
        entry = json.loads(base64.b64decode(message["data"], validate=True))
        method = entry["protoPayload"]["methodName"]
        name, id_ = entry["protoPayload"]["resourceName"], message["messageId"]
    except (KeyError, TypeError, ValueError, binascii.Error, RecursionError):
        raise InputError(Problem("body", "is no push of a log entry", SEE)) from None
    if method != PREEMPTED:
        return []  # Acknowledged, or it would come again and again.
    return [_intent(f"pubsub:{id_}", "preempt", str(name).rpartition("/")[2], None, method)]


def _from_alerts(body: dict[str, Any]) -> list[Intent]:
    alerts = body.get("alerts")
    if not isinstance(alerts, list) or len(alerts) > ALERTS_MAX:
        raise InputError(Problem("body: alerts", f"is no list of up to {ALERTS_MAX}", SEE))
    intents = {}
    for alert in alerts:
        try:
            labels, status = alert["labels"], alert["status"]
            node = labels.get("node") or labels["instance"].rpartition(":")[0]
            id_ = f"alert:{alert['fingerprint']}:{alert['startsAt']}:{status}"
            name = str(labels.get("alertname", ""))
        except (KeyError, TypeError, AttributeError):
            raise InputError(
                Problem("body: alerts", "holds one without a node", "give it the label node")
            ) from None
        if not isinstance(node, str) or status not in ("firing", "resolved"):
            raise InputError(Problem("body: alerts", "holds one that is no alert", SEE))
        intent = _intent(id_, "withdraw" if status == "resolved" else "preempt", node, None, name)
        intents[intent.id] = intent
    return list(intents.values())


def _intent(id_: str, kind: IntentKind, node: str, leaves_at: float | None, reason: str) -> Intent:
    if not NODE.match(node):
        raise InputError(Problem("body", "names no node", "give a node's name"))
    # Whatever characters a sender's id has, its hash is a safe key.
    key = f"hook-{hashlib.sha256(id_.encode('utf-8', 'replace')).hexdigest()[:32]}"
    return Intent(key, kind, node, leaves_at, reason[:200].encode("utf-8", "replace").decode())
