"""A small job and three nodes to plan for."""

from __future__ import annotations

from pathlib import Path

from agents.protocol.records import NodeId, NodeRecord
from sailord.planning.messages import PlanRequest

ROOT = Path(__file__).resolve().parents[3]
SPEC = (ROOT / "examples" / "small.toml").read_text(encoding="utf-8")


def node(name: str, *, gpus: int = 2) -> NodeRecord:
    return NodeRecord(
        NodeId(f"{name}.1"), name, "us-central1-b", f"A100-40x{gpus}", "A100-40", gpus, "h:1"
    )


NODES = (node("a"), node("b"), node("c"))
QUESTION = PlanRequest(SPEC, ROOT / "examples" / "three-zones.toml", None, NODES, None, ())
