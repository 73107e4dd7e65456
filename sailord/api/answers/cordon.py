"""Why and since when a node is cordoned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sailord.core.model.nodes import Node
from sailord.core.model.state import State
from sailord.notify.feed import FeedEvent


def ordered_at(feed: Iterable[FeedEvent]) -> dict[str, float]:
    """Return when each order was given, by its id, as far as events go back."""
    return {event.order: event.at for event in feed if event.order}


def cordon_of(state: State, node: Node, at_of: Mapping[str, float]) -> tuple[str, float | None]:
    """Why a node was cordoned, from the order that the store keeps, and when, from the events."""
    orders = reversed(state.marks.get(node.record.id, ()))
    order = next((each for each in orders if each.kind == "cordon"), None)
    if order is None or not node.exclusion.is_cordoned:
        return "", None
    return order.reason, at_of.get(order.id)
