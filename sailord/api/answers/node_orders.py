"""Which order keeps a node out of plans, and since when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agents.protocol.records import OrderKind
from sailord.core.model.nodes import Node
from sailord.core.model.state import State
from sailord.notify.feed import FeedEvent


@dataclass(frozen=True, slots=True)
class GivenReason:
    """The reason of an order, with who gave it; empty: not known."""

    why: str = ""
    at: float | None = None
    """When it was given; ``None``: too long ago to be known."""


NOT_ORDERED = GivenReason()


def ordered_at(feed: Iterable[FeedEvent]) -> dict[str, float]:
    """Return when each order was given, by its id, as far as events go back."""
    return {event.order: event.at for event in feed if event.order}


def cordon_of(state: State, node: Node, at_of: Mapping[str, float]) -> GivenReason:
    """Why a node was cordoned, from the order that the store keeps, and when, from the events."""
    return (
        _find_last_order(state, node, at_of, ("cordon",))
        if node.exclusion.is_cordoned
        else NOT_ORDERED
    )


def drain_of(state: State, node: Node, at_of: Mapping[str, float]) -> GivenReason:
    """Why a node was drained or preempted, and when; not if it drains to go to another job."""
    is_ordered = node.exclusion.draining_since is not None
    return _find_last_order(state, node, at_of, ("drain", "preempt")) if is_ordered else NOT_ORDERED


def _find_last_order(
    state: State, node: Node, at_of: Mapping[str, float], kinds: tuple[OrderKind, ...]
) -> GivenReason:
    for order in reversed(state.marks.get(node.record.id, ())):
        if order.kind in kinds:
            return GivenReason(order.reason, at_of.get(order.id))
    return NOT_ORDERED
