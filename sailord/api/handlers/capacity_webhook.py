"""Capacity webhook: takes reports such as "4 A100-40 available in us-central1-a".

A report is noted in the event feed and ends the cooldown of pools that were out of stock there.
Each message counts once; its id is stored, so that a new leader recognizes a repeated message too.
It takes the same forms as the preemption webhook.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from agents.protocol.names import JOB_ID
from agents.store.interface import Delete, Entry, WriteUnknown
from sailord.api.answers.responses import answer, refusal
from sailord.api.answers.types import Accepted
from sailord.api.handlers.bodies import ID_CURE, read_object
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.orders import OTHER_ID
from sailord.api.handlers.webhook_message import ALERTS_MAX, SEE, read_message
from sailord.cluster_records import Gateway, Given
from sailord.notify.feed import FeedEvent
from simulator.documents.problems import InputError, Problem

GPUS_MAX = 10**6
KEPT = 1_000
"""Stored messages; one that is repeated after this many others counts as new."""
_COUNT = re.compile(r"[0-9]{1,7}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class AvailableGpus:
    """How many GPUs of a kind are available in a zone."""

    id: str
    zone: str
    gpu: str
    gpus: int


async def capacity(request: web.Request) -> web.Response:
    """Note available GPUs in the event feed, and end stock-out cooldowns of pools with them."""
    api = request.app[CONTEXT]
    form, body = await read_message(request)
    if form == "pubsub":
        news = [_from_pubsub(body)]
    elif form == "alertmanager":
        news = _from_alerts(body)
    else:
        kinds: dict[str, type] = {"id": str, "zone": str, "gpu": str, "gpus": int}
        news = [_news("plain", await read_object(request, kinds, tuple(kinds)))]

    feed = api.cluster.feed

    def note(each: AvailableGpus) -> None:
        now = api.clock.now()
        text = f"{each.gpus} {each.gpu} available in {each.zone}"
        feed.add(FeedEvent(feed.next_id(now), now, "note", text))
        if each.gpus and api.capacity is not None:
            api.capacity.report_stock(each.zone, each.gpu)

    given = await note_new(api.gateway, news, note)
    if "other" in given:
        return refusal(409, OTHER_ID)
    return answer(Accepted(len(news), given.count("new")), status=202)


async def note_new(
    gateway: Gateway, news: Sequence[AvailableGpus], note: Callable[[AvailableGpus], None]
) -> list[Given]:
    """Note each new message as soon as it is stored; raises what the store raises."""
    given: list[Given] = []
    kept = await stored_messages(gateway)
    for each in news:
        # Noted one by one: if the store fails midway, the sender's retry repeats none of them.
        given.append(await store_message(gateway, each, kept))
        if given[-1] == "new":
            note(each)
    return given


async def stored_messages(gateway: Gateway) -> list[Entry]:
    """The stored messages, oldest first."""
    entries = (await gateway.store.snapshot(gateway.keys.news)).entries
    return sorted(entries, key=lambda entry: entry.created)


async def store_message(gateway: Gateway, news: AvailableGpus, entries: Sequence[Entry]) -> Given:
    """Store a message under its id unless it is there; raises what the store raises."""
    # The hash is a safe key, whatever characters the sender's id has.
    name = hashlib.sha256(news.id.encode("utf-8", "replace")).hexdigest()[:32]
    key = gateway.keys.news + name
    old = [Delete(entry.key) for entry in entries[: max(len(entries) + 1 - KEPT, 0)][:50]]
    try:
        # The count may differ between repetitions of a message.
        return await gateway.put_once(key, news, lambda known: (known.zone, known.gpu), old)
    except WriteUnknown:
        if any(entry.key == key for entry in entries):
            return "known"
        return "new"  # Noting it twice is better than never.


def _news(form: str, said: dict[str, Any]) -> AvailableGpus:
    """Build a message from its parts; raises ``InputError``."""
    parts: list[Any] = [said.get(key) for key in ("id", "zone", "gpu", "gpus")]
    id_, zone, gpu, gpus = parts
    if not isinstance(id_, str) or (form == "plain" and not JOB_ID.match(id_)):
        raise InputError(Problem("body: id", "invalid id", SEE))
    for key, name in (("zone", zone), ("gpu", gpu)):
        if not isinstance(name, str) or not JOB_ID.match(name):
            raise InputError(Problem(f"body: {key}", "invalid name", ID_CURE))
    if type(gpus) is not int or not 0 <= gpus <= GPUS_MAX:
        cure = f"give an integer from 0 to {GPUS_MAX:,}"
        raise InputError(Problem("body: gpus", "invalid count", cure))
    return AvailableGpus(f"{form}:{id_}", zone, gpu, gpus)


def _from_pubsub(body: dict[str, Any]) -> AvailableGpus:
    try:
        message = body["message"]
        said = json.loads(base64.b64decode(message["data"], validate=True))
        said = {**said, "id": message["messageId"]}
    except (KeyError, TypeError, ValueError, binascii.Error, RecursionError):
        what = "is not a push of a message with zone, gpu and gpus"
        raise InputError(Problem("body", what, SEE)) from None
    return _news("pubsub", said)


def _from_alerts(body: dict[str, Any]) -> list[AvailableGpus]:
    alerts = body.get("alerts")
    if not isinstance(alerts, list) or len(alerts) > ALERTS_MAX:
        raise InputError(Problem("body: alerts", f"is not a list of at most {ALERTS_MAX}", SEE))
    found: dict[str, AvailableGpus] = {}
    for alert in alerts:
        try:
            labels, status = alert["labels"], alert["status"]
            count = str({**alert.get("annotations", {}), **labels}["gpus"])
            id_ = f"{alert['fingerprint']}:{alert['startsAt']}:{status}"
            zone, gpu = labels["zone"], labels["gpu"]
        except (KeyError, TypeError, AttributeError):
            cure = "give it the labels zone and gpu, and gpus as a label or an annotation"
            raise InputError(Problem("body: alerts", "an alert lacks labels", cure)) from None
        if status not in ("firing", "resolved") or not _COUNT.match(count):
            raise InputError(Problem("body: alerts", "an entry is not an alert", SEE))
        gpus = int(count) if status == "firing" else 0
        each = _news("alert", {"id": id_, "zone": zone, "gpu": gpu, "gpus": gpus})
        found[each.id] = each
    return list(found.values())
