"""News of capacity from outside: told to whoever follows events, each once.

What was told stands in the store under the sender's own id, so that a message that comes again is
known, also to a sailord that was started anew or leads since. It takes the same forms as notices.
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

from agents.protocol.codec import decode, encode
from agents.store import Delete, Entry, ModifiedAt, Put, WriteUnknown
from sailord.api.app import API, answer, refusal
from sailord.api.jobs_and_nodes import ID, OTHER_ID, read_object
from sailord.api.preemption_webhook import ALERTS_MAX, SEE, Refused, read_message
from sailord.api.types import Accepted
from sailord.cluster_records import Gateway, Given
from sailord.notify.feed import Happening
from simulator.documents.problems import InputError, Problem

GPUS_MAX = 10**6
KEPT = 1_000
"""So many are remembered; one that comes again after as many others counts as new."""
_COUNT = re.compile(r"[0-9]{1,7}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class News:
    """So many GPUs of a kind can be had in a zone."""

    id: str
    zone: str
    gpu: str
    gpus: int


async def capacity(request: web.Request) -> web.Response:
    """More machines can be had somewhere; told to whoever follows."""
    api = request.app[API]
    try:
        form, body = await read_message(request)
    except Refused as error:
        return error.response
    if form == "pubsub":
        news = [_from_pubsub(body)]
    elif form == "alertmanager":
        news = _from_alerts(body)
    else:
        kinds: dict[str, type] = {"id": str, "zone": str, "gpu": str, "gpus": int}
        news = [_news("plain", await read_object(request, kinds, tuple(kinds)))]

    def tell(each: News) -> None:
        now = api.clock.now()
        text = f"{each.gpus} {each.gpu} can be had in {each.zone}"
        api.shell.feed.add(Happening(api.shell.feed.next_id(now), now, "note", text))

    given = await tell_each(api.gateway, news, tell)
    if "other" in given:
        return refusal(409, OTHER_ID)
    return answer(Accepted(len(news), given.count("new")), status=202)


async def tell_each(
    gateway: Gateway, news: Sequence[News], tell: Callable[[News], None]
) -> list[Given]:
    """Tell what is new, each as soon as it is remembered; raises what the store raises."""
    given: list[Given] = []
    kept = await recorded(gateway)
    for each in news:
        # Whatever is known when the store goes away was told: it does not come again as new.
        given.append(await remember(gateway, each, kept))
        if given[-1] == "new":
            tell(each)
    return given


async def recorded(gateway: Gateway) -> list[Entry]:
    """What is remembered, oldest first."""
    entries = (await gateway.store.snapshot(gateway.keys.news)).entries
    return sorted(entries, key=lambda entry: entry.created)


async def remember(gateway: Gateway, news: News, entries: Sequence[Entry]) -> Given:
    """Store it under its id unless it was; raises what the store raises."""
    # Whatever characters a sender's id has, its hash is a safe key.
    name = hashlib.sha256(news.id.encode("utf-8", "replace")).hexdigest()[:32]
    store, key = gateway.store, gateway.keys.news + name
    old = [Delete(entry.key) for entry in entries[: max(len(entries) + 1 - KEPT, 0)][:50]]
    if all(entry.key != key for entry in entries):
        try:
            outcome = await store.transact([ModifiedAt(key, 0)], [Put(key, encode(news)), *old])
        except WriteUnknown:
            return "new"  # Rather told twice than never.
        if outcome.is_applied:
            return "new"
    there = await store.get(key)
    if there is None:
        return "known"  # It was forgotten just now.
    known = decode(News, there.value)
    # A count may be another one each time that the same is told.
    return "known" if (known.zone, known.gpu) == (news.zone, news.gpu) else "other"


def _news(form: str, said: dict[str, Any]) -> News:
    """News from its parts; ``InputError`` where they cannot be any."""
    id_, zone, gpu, gpus = (said.get(key) for key in ("id", "zone", "gpu", "gpus"))
    if not isinstance(id_, str) or (form == "plain" and not ID.match(id_)):
        raise InputError(Problem("body: id", "is no name", SEE))
    for key, name in (("zone", zone), ("gpu", gpu)):
        if not isinstance(name, str) or not ID.match(name):
            raise InputError(Problem(f"body: {key}", "is no name", "give it as the cluster does"))
    if type(gpus) is not int or not 0 <= gpus <= GPUS_MAX:
        raise InputError(Problem("body: gpus", "is no count", f"give 0 to {GPUS_MAX:,}"))
    assert isinstance(zone, str)
    assert isinstance(gpu, str)
    return News(f"{form}:{id_}", zone, gpu, gpus)


def _from_pubsub(body: dict[str, Any]) -> News:
    try:
        message = body["message"]
        said = json.loads(base64.b64decode(message["data"], validate=True))
        said = {**said, "id": message["messageId"]}
    except (KeyError, TypeError, ValueError, binascii.Error, RecursionError):
        what = "is no push of a message with zone, gpu and gpus"
        raise InputError(Problem("body", what, SEE)) from None
    return _news("pubsub", said)


def _from_alerts(body: dict[str, Any]) -> list[News]:
    alerts = body.get("alerts")
    if not isinstance(alerts, list) or len(alerts) > ALERTS_MAX:
        raise InputError(Problem("body: alerts", f"is no list of up to {ALERTS_MAX}", SEE))
    found: dict[str, News] = {}
    for alert in alerts:
        try:
            labels, status = alert["labels"], alert["status"]
            count = str({**alert.get("annotations", {}), **labels}["gpus"])
            id_ = f"{alert['fingerprint']}:{alert['startsAt']}:{status}"
            zone, gpu = labels["zone"], labels["gpu"]
        except (KeyError, TypeError, AttributeError):
            cure = "give it the labels zone and gpu, and gpus as a label or an annotation"
            raise InputError(Problem("body: alerts", "holds one without capacity", cure)) from None
        if status not in ("firing", "resolved") or not _COUNT.match(count):
            raise InputError(Problem("body: alerts", "holds one that is no alert", SEE))
        gpus = int(count) if status == "firing" else 0
        each = _news("alert", {"id": id_, "zone": zone, "gpu": gpu, "gpus": gpus})
        found[each.id] = each
    return list(found.values())
