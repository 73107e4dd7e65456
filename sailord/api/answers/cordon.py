"""Why and since when a node is cordoned."""

from __future__ import annotations

from collections.abc import Reversible

from sailord.core.model.nodes import Node
from sailord.core.model.state import State
from sailord.notify.feed import FeedEvent


def cordon_of(state: State, node: Node, feed: Reversible[FeedEvent]) -> tuple[str, float | None]:
    """Why a node was cordoned, from the order that the store keeps, and when, from the events."""
    record = node.record
    orders = (each for each in reversed(state.marks.get(record.id, ())) if each.kind == "cordon")
    order = next(orders, None) if node.exclusion.is_cordoned else None
    if order is None:
        return "", None
    told = (e for e in reversed(feed) if e.kind == "order" and e.text.startswith("cordoning "))
    event = next((each for each in told if each.node in (record.id, record.name)), None)
    return order.reason, None if event is None else event.at
