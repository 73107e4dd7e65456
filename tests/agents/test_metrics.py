"""The agent's metrics: what a scrape reads, and from whom it is taken."""

from __future__ import annotations

import re

from agents.core.model import State
from agents.metrics import metrics_text
from agents.protocol.records import Fence, NodeId, NodeRecord, Report

NODE = NodeRecord(NodeId("a.1"), "a", "zone", "box", "A100-40", 8, "h:1", "ready")
SAID = Report(
    NODE.id, 5, Fence(1, 3), 3, "running", 40, busy=((0, 1.5),), stall_s=0.2,
    phases=(("fetch", 2.0),),
)  # fmt: skip


def lines(state: State) -> dict[str, float]:
    text = metrics_text(state, now=100.0, answered_s=0.0, refused={"signature": 3}, unreadable=0)
    return {name: float(value) for name, value in re.findall(r"^(sailor\S+) (\S+)$", text, re.M)}


def test_metrics_show_what_the_node_does_and_its_trouble() -> None:
    found = lines(State(NODE, last_report=SAID, trouble="full", store_silent_since=90.0))
    assert found['sailor_agent_taking{taking="running"}'] == 1
    assert found['sailor_agent_taking{taking="idle"}'] == 0
    assert found["sailor_agent_step"] == 40
    assert found["sailor_agent_store_silent_seconds"] == 10
    assert found["sailor_agent_snapshot_trouble"] == 1
    assert found["sailor_agent_snapshot_stall_seconds"] == 0.2
    assert found['sailor_agent_requests_refused_total{why="signature"}'] == 3
    assert found['sailor_agent_phase_seconds{phase="fetch"}'] == 2


def test_a_fresh_agent_has_metrics_before_its_first_report() -> None:
    found = lines(State(NODE))
    assert found['sailor_agent_taking{taking="idle"}'] == 1
    assert found["sailor_agent_registered"] == 0
    assert any(name.startswith("sailor_agent_build_info{") for name in found)
