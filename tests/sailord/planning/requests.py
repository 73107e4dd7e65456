"""A small job and three nodes to plan for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import sailord.local
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

DATA = Path(sailord.local.__file__).parent / "data"
CHUNKED_SPEC = (DATA / "exact.toml").read_text(encoding="utf-8").replace(
    "_batch = 16", "_batch = 8"
) + '[objective]\nallow = ["interleaved"]\n'
LARGE = tuple(
    NodeRecord(NodeId(f"a{n}.1"), f"a{n}", "zone-a", "emulated-large", "emulated-large", 1, "h:1")
    for n in range(5)
)
CHUNKED = replace(QUESTION, spec=CHUNKED_SPEC, cluster_file=DATA / "cluster.toml", nodes=LARGE)
"""Its plan has one pipeline of four device groups, of two chunks each; a node is spare."""
