"""The last event of a kind, and of an order what came of it, by the events after it."""

from __future__ import annotations

import re
from collections.abc import Reversible

from agents.protocol.records import JobId
from sailord.api.answers.types import Told
from sailord.notify.feed import EventKind, FeedEvent


def last_told(
    feed: Reversible[FeedEvent], kind: EventKind, job: JobId | None = None
) -> Told | None:
    """The last event of a kind, about one job or about any."""
    result: FeedEvent | None = None
    later: list[FeedEvent] = []
    for event in reversed(feed):
        if event.kind == kind and (job is None or event.job == job):
            result = next((each for each in reversed(later) if _is_result(event, each)), None)
            if result is None:
                return Told(event.at, event.text)
            return Told(event.at, event.text, _result_text(result), result.at)
        later.append(event)
    return None


def _is_result(order: FeedEvent, event: FeedEvent) -> bool:
    """Return whether a later event is what an order has led to."""
    if order.kind != "order" or order.job is None or event.job != order.job:
        return False
    if event.settled is not None:
        return order.text.startswith("a checkpoint of ")
    if event.kind != "reconfigured":
        return False
    cause = event.text.partition(" → ")[0]
    if found := re.match(r"a rollback of \S+( to step \d+ was ordered)", order.text):
        return f"a rollback{found[1]}" in cause
    if order.node is None or not order.text.startswith(("draining ", "preempting ")):
        return False
    is_named = re.search(rf"(?<![\w-]){re.escape(order.node)}(?![\w-])", cause) is not None
    return is_named and ("draining" in cause or "preempted" in cause)


def _result_text(event: FeedEvent) -> str:
    """Return where the job goes on, or what is durable."""
    if event.kind == "reconfigured":
        return f"generation {event.generation} runs from step {event.step}"
    return event.text
