"""Finds the last event of a kind, such as a move or an order, and what came of it."""

from __future__ import annotations

from collections.abc import Reversible

from agents.protocol.records import JobId
from sailord.api.answers.types import Told
from sailord.notify.feed import EventKind, FeedEvent


def last_told(
    feed: Reversible[FeedEvent], kind: EventKind, job: JobId | None = None
) -> Told | None:
    """The last event of a kind, about one job or about any."""
    result_of: dict[str, FeedEvent] = {}
    for event in reversed(feed):
        if event.kind == kind and (job is None or event.job == job):
            result = result_of.get(event.order)
            if result is None:
                return Told(event.at, event.text)
            return Told(event.at, event.text, _result_text(result), result.at)
        if event.settled is not None:
            result_of |= dict.fromkeys(event.settled.orders, event)
    return None


def _result_text(event: FeedEvent) -> str:
    """Return where the job goes on, what is durable, or the state that the job came into."""
    if event.kind == "reconfigured":
        return f"generation {event.generation} runs from step {event.step}"
    if event.kind != "transition":
        return event.text.partition(" (by ")[0]  # The order itself tells who gave it.
    state = event.text.partition(": ")[0]
    return "the job has the cluster" if state == "running" else state
