"""Reads a webhook's message: a signed one, a Pub/Sub push or an alert, once its sender is known."""

from __future__ import annotations

import hmac
import json
import re
import time
from typing import Any, Literal

from aiohttp import web

from agents.rpc.strangers import note_authenticated
from agents.rpc.unsigned_bodies import read_unsigned
from sailord.api.access.key_set import KeySet
from sailord.api.access.webhook_tokens import TokenError, check_token, key_id_of
from sailord.api.answers.responses import Refusal, too_many
from sailord.api.handlers.context import CONTEXT
from sailord.config import Webhooks
from sailord.notify.webhook_signature import SIGNATURE_HEADER, sign
from simulator.documents.problems import InputError, Problem

AGE_S_MAX = 300.0
_SIGNATURE = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})\Z", re.ASCII)
ALERTS_MAX = 500
SEE = "docs/api.md describes the forms of webhooks"
NO_WEBHOOKS = "no webhooks are configured here ([webhooks] in sailord.toml)"
MessageForm = Literal["plain", "pubsub", "alertmanager"]


async def read_message(request: web.Request) -> tuple[MessageForm, dict[str, Any]]:
    """Authenticate the sender by the headers, and only then read the body.

    A signature also covers the body, which is read before it is verified. Returns the form, and the
    message; ``{}`` for a plain one, which the handler reads.
    """
    api = request.app[CONTEXT]
    hooks, header = api.config.webhooks, request.headers.get(SIGNATURE_HEADER)
    kind: MessageForm = "plain"
    if hooks.secret is None and hooks.alertmanager_token is None and api.pubsub_keys is None:
        raise _refuse_sender(NO_WEBHOOKS)
    if header is not None:
        await _check_signature(request, hooks.secret, header)
    else:
        kind = await _bearer_form(hooks, api.pubsub_keys, request.headers.get("Authorization", ""))
    note_authenticated(request)
    # Only authenticated messages count, so that strangers cannot use up the limit.
    if not api.webhook_budgets.of(kind).take():
        raise too_many("messages")
    return kind, {} if kind == "plain" else _object(await read_unsigned(request))


async def _check_signature(request: web.Request, secret: bytes | None, header: str) -> None:
    """Check form and age of the signature before the body arrives, then the signature."""
    form = _SIGNATURE.match(header)
    if secret is None or form is None:
        raise _refuse_sender("malformed signature, or no secret is configured")
    if abs(time.time() - float(form[1])) > AGE_S_MAX:
        why = f"the signature is more than {AGE_S_MAX:g} s old, or a clock is wrong"
        raise _refuse_sender(why)
    body = await read_unsigned(request)
    if not hmac.compare_digest(sign(secret, body, float(form[1])), form[0]):
        raise _refuse_sender("the signature is wrong")


def _refuse_sender(why: str) -> Refusal:
    return Refusal(401, Problem("the sender", why, SEE))


async def _bearer_form(hooks: Webhooks, keys: KeySet | None, header: str) -> MessageForm:
    kind, _, token = header.partition(" ")
    if kind != "Bearer" or not token:
        raise _refuse_sender(f"neither {SIGNATURE_HEADER} nor a bearer token was sent")
    if token.count(".") == 2 and keys is not None:
        assert hooks.pubsub_audience is not None
        assert hooks.pubsub_email is not None
        try:
            known = await keys.find(key_id_of(token))
            check_token(token, known, audience=hooks.pubsub_audience, email=hooks.pubsub_email)
        except TokenError as error:
            raise _refuse_sender(str(error)) from None
        return "pubsub"
    expected = (hooks.alertmanager_token or "").encode()
    if not expected or not hmac.compare_digest(token.encode("utf-8", "replace"), expected):
        raise _refuse_sender("the token is wrong")
    return "alertmanager"


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InputError(Problem("body", "is not a JSON object", SEE))
    return value
