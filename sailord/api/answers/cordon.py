"""Why and since when a node is cordoned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sailord.core.model.nodes import Node
from sailord.core.model.state import State
from sailord.notify.feed import FeedEvent


def cordoned_at(feed: Iterable[FeedEvent]) -> dict[str, float]:
    """Return when each node was last cordoned, by its name or id, as far as events go back."""
    told = (e for e in feed if e.kind == "order" and e.text.startswith("cordoning "))
    return {each.node: each.at for each in told if each.node is not None}


def cordon_of(state: State, node: Node, at_of: Mapping[str, float]) -> tuple[str, float | None]:
    """Why a node was cordoned, from the order that the store keeps, and when, from the events."""
    record = node.record
    orders = (each for each in reversed(state.marks.get(record.id, ())) if each.kind == "cordon")
    order = next(orders, None) if node.exclusion.is_cordoned else None
    if order is None:
        return "", None
    return order.reason, max(filter(None, map(at_of.get, (record.id, record.name))), default=None)
