"""Text of ``sailorctl nodes``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.codec import plain
from agents.protocol.versions import UNNUMBERED, Protocol
from sailord.api.answers import render
from sailord.notify.feed import FeedEvent
from sailord.text.node_text import node_text, nodes_text
from sailord.text.units import timestamp
from tests.sailord.core.states import NOW, A, B, C, changed, node, order, report, state


def test_versions_are_told_while_they_differ():
    of = {A: Protocol(1, 0, "0.2.0"), B: Protocol(1, 0, "0.1.0"), C: UNNUMBERED}
    nodes = [
        changed(node(id_), record=replace(node(id_).record, protocol=protocol))
        for id_, protocol in of.items()
    ]
    shown = json.loads(json.dumps(plain(render.nodes_view(state(None, *nodes)))))["nodes"]
    assert nodes_text(shown).splitlines()[-3:] == [
        "Sailor 0.1.0 is on 1 node: machine-b",
        "Sailor 0.2.0 is on 1 node: machine-a",
        "an older Sailor is on 1 node: machine-c",
    ]
    assert "version         0.2.0" in node_text(shown[0])
    alike = [{**each, "version": "0.2.0"} for each in shown]
    assert "Sailor" not in nodes_text(alike)
    by_older_sailord = [
        {name: fact for name, fact in each.items() if name != "version"} for each in shown
    ]
    assert "Sailor" not in nodes_text(by_older_sailord)
    gone = [{**shown[0], "state": "lost"}, shown[1]]
    assert "Sailor" not in nodes_text(gone)


def ordered(kind: str, part: str, **facts: Any) -> dict[str, Any]:
    """The first of two nodes, about which an order was given."""
    given = order(kind, A, id_="given", reason="disk swap (by root)")
    event = FeedEvent(1, NOW - 60, "order", "it was ordered", order="given")
    known = state(None, changed(node(A, report(A, part)), **facts), node(B))
    view = render.nodes_view(replace(known, marks={A: (given,)}), feed=(event,)).nodes[0]
    told: dict[str, Any] = json.loads(json.dumps(plain(view)))
    return told


CORDONED: Mapping[str, Any] = {"is_cordoned": True}
DRAINING: Mapping[str, Any] = {"draining_since": NOW - 60}


@pytest.mark.parametrize(
    ("kind", "part", "facts", "then"),
    [
        ("cordon", "idle", CORDONED, "uncordon machine-a lets plans use it again"),
        ("cordon", "running", CORDONED,
         "uncordon machine-a lets it stay; until then the next better plan does without it"),
        ("drain", "running", DRAINING, "withdraw machine-a lets plans use it again"),
    ],
    ids=["cordoned", "cordoned, in use", "draining"],
)  # fmt: skip
def test_a_node_that_orders_keep_out_says_since_when_why_and_the_way_back(kind, part, facts, then):
    shown = ordered(kind, part, **facts)
    text = f"{shown['state']} since {timestamp(NOW - 60)}: disk swap (by root); sailorctl {then}"
    assert f"machine-a is {text}" in nodes_text([shown]).splitlines()
    assert f"out             {text}" in node_text(shown).splitlines()


def test_a_drained_node_says_who_ordered_it_and_a_preempted_one_offers_no_way_back():
    drained = {**ordered("drain", "idle", **DRAINING), "safe_to_stop": True}
    said = f"drained, ordered {timestamp(NOW - 60)}: disk swap (by root); sailorctl withdraw"
    assert f"machine-a is {said} machine-a lets plans use it again" in nodes_text([drained])
    notice = {**ordered("preempt", "running", **DRAINING), "leaves_at": NOW + 30}
    ends = f"; it ends {timestamp(NOW + 30)}"
    assert nodes_text([notice]).endswith(": disk swap (by root)" + ends)
    older = {name: fact for name, fact in drained.items() if not name.startswith("drained_")}
    assert "withdraw" not in nodes_text([older])
    assert not ordered("drain", "running", yields_since=NOW - 60)["drained_why"], "to another job"
    forgotten = {**ordered("cordon", "idle", **CORDONED), "cordoned_at": None}
    assert "machine-a is cordoned: disk swap (by root); " in nodes_text([forgotten])
    assert "is cordoned" not in nodes_text([ordered("cordon", "idle")]), "it was uncordoned"
