"""Text of ``sailorctl nodes``."""

from __future__ import annotations

import json
from dataclasses import replace

from agents.protocol.codec import plain
from agents.protocol.versions import UNNUMBERED, Protocol
from sailord.api.answers import render
from sailord.text.node_text import node_text, nodes_text
from tests.sailord.core.states import A, B, C, changed, node, state


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
