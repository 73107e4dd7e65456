"""A request about a node that left is answered with its last event."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agents.protocol.codec import encode
from agents.protocol.records import Output, OutputPart
from agents.rpc.client import CallFailed
from sailord.api.answers.responses import Refusal
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.nodes import ENDED_HEADER, logs, nodes_of
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
    """Its logs are asked for: an instance that was made anew has another address."""
    lives = [
        node(A, record=record(A, name="x"), since=NOW - 9),
        node(B, record=record(B, name="x"), since=NOW - 3, lost_at=NOW),
        node(C, record=record(C, name="x"), since=NOW - 6),
    ]
    found = nodes_of(asked_for("x", Feed(), *lives))
    assert [each.record.id for each in found] == [C, A, B]


def log_of(name: str, feed: Feed, *nodes: Node, written: Output | None, **query: str) -> Any:
    """A request for a node's logs; its agent answers with ``written``, or not at all."""

    async def call(_record: object, _method: str, path: str) -> bytes:
        paths.append(path)
        if written is None:
            raise CallFailed("no route to it")
        return encode(written)

    paths: list[str] = []
    request = asked_for(name, feed, *nodes)
    request.app[CONTEXT].cluster.agents = SimpleNamespace(call=call)
    request.query, request.paths = query, paths
    return request


async def test_logs_of_a_node_that_left_are_said_to_be_on_its_machine() -> None:
    feed = Feed()
    feed.add(FeedEvent(1, NOW, "note", "c3 left: its lease ended", node="c3"))
    with pytest.raises(Refusal) as refused:
        await logs(log_of("c3", feed, written=None))
    assert "its logs are on that machine: journalctl -u sailor-agent" in str(refused.value)
    lost = node(A, lost_at=NOW)
    answer = await logs(log_of("machine-a", feed, lost, written=None))
    assert (answer.status, "process/*/output" in (answer.text or "")) == (502, True)
    answer = await logs(log_of("machine-a", feed, node(A), written=None))
    assert "process/*/output" not in (answer.text or ""), "it is up, and may answer soon"


async def test_logs_of_workers_that_ended_are_told_of_and_shown_on_demand() -> None:
    now = Output((0,), (OutputPart(0, "step 9\n"),), "0:j.4.0:7", ended=2)
    answer = await logs(log_of("machine-a", Feed(), node(A), written=now))
    assert (answer.text, answer.headers[ENDED_HEADER]) == ("step 9\n", "2")
    parts = OutputPart(0, "==> it ended <==\nstep 1\n"), OutputPart(0, "==> it, too <==\n")
    asked = log_of("machine-a", Feed(), node(A), written=Output((), parts, "", 2), ended="true")
    answer = await logs(asked)
    assert asked.paths == ["/v1/logs/ended"]
    assert answer.text == "==> it ended <==\nstep 1\n==> it, too <==\n"
    with pytest.raises(Refusal, match="no log of an ended worker"):
        await logs(log_of("machine-a", Feed(), node(A), written=Output((), (), ""), ended="true"))
