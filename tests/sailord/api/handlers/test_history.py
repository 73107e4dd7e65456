"""A job's history while the store is unavailable: from the events that this sailord keeps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from agents.protocol.store_keys import Keys
from agents.store.interface import StoreError
from sailord.api.handlers.jobs import _read_history
from sailord.cluster_records import Gateway
from sailord.notify.announcer import Announcer
from sailord.notify.feed import Feed, FeedEvent
from sailord.notify.outbox import Outbox
from tests.sailord.core.states import JOB


def test_history_without_the_store_has_orders_and_summaries_and_marks_details():
    async def unavailable(_: object) -> None:
        raise StoreError("no route to the store")

    feed = Feed()
    for number, kind in enumerate(
        ("transition", "order", "reconfigured", "budget_at_risk", "node_lost", "note")
    ):
        is_detail = kind == "transition"
        feed.add(FeedEvent(number, 1.0, kind, f"a text of {kind}", job=JOB, is_detail=is_detail))
    feed.add(FeedEvent(9, 1.0, "order", "of another job", job="other"))
    gateway = Gateway(None, Keys("test"))  # type: ignore[arg-type] # nothing is written here
    cluster = SimpleNamespace(
        history_of=Announcer(gateway, feed, Outbox(gateway)).history_in_memory,
        store=SimpleNamespace(unavailable_since=3.0),
    )
    api: Any = SimpleNamespace(gateway=SimpleNamespace(read_history=unavailable), cluster=cluster)
    lines, since = asyncio.run(_read_history(api, JOB))
    assert since == 3.0
    assert [(line.id, line.is_detail) for line in lines] == [
        (0, True), (1, False), (2, False), (3, False),
    ]  # fmt: skip
