"""A request about a node that left is answered with its last event."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sailord.api.answers.responses import Refusal
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.nodes import nodes_of
from sailord.core.model.nodes import Node
from sailord.notify.feed import Feed, FeedEvent
from tests.sailord.core.states import NOW, A, B, C, node, record, state


def asked_for(name: str, feed: Feed, *nodes: Node) -> Any:
    """A request about a node, as far as the handler reads one."""
    context = SimpleNamespace(cluster=SimpleNamespace(last_led=state(None, *nodes), feed=feed))
    return SimpleNamespace(app={CONTEXT: context}, match_info={"node": name})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("c3", "no such node any more: c3 left: its lease ended"),
        ("machine-x", "no such node"),
    ],
)
def test_missing_node_is_answered_with_its_last_event(name: str, said: str) -> None:
    feed = Feed()
    feed.add(FeedEvent(1, NOW, "note", "c3 is lost", node="c3"))
    feed.add(FeedEvent(2, NOW, "note", "c3 left: its lease ended", node="c3"))
    with pytest.raises(Refusal) as refused:
        nodes_of(asked_for(name, feed))
    assert str(refused.value).startswith(f"{name}: {said}")


def test_of_several_lives_the_present_one_comes_first() -> None:
    """Whose logs are asked for; an instance that was made anew has another address."""
    lives = [
        node(A, record=record(A, name="x"), since=NOW - 9),
        node(B, record=record(B, name="x"), since=NOW - 3, lost_at=NOW),
        node(C, record=record(C, name="x"), since=NOW - 6),
    ]
    found = nodes_of(asked_for("x", Feed(), *lives))
    assert [each.record.id for each in found] == [C, A, B]
