"""Who plans in the simulated world: mostly a quick stand-in, in some lives the real planner."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from agents.protocol.records import Busy, GenerationRecord, NodeId, NodeRecord
from sailord.core.proposal import Proposal
from sailord.planning.messages import FoundPlan, PlanRequest
from sailord.planning.plan_search import answer

MEMBERS_MIN = 2
MOVE_S = 1.5

SPEC = """
[model]
family = "gpt2"
layers = 6
hidden = 4096
heads = 32
vocab = 1024
sequence = 256

[training]
global_batch = 240
sequence = 256
precision = "fp32"
max_tp = 1
"""
"""A job that needs two of these machines and gains by each more."""

CLUSTER = """
[[pool]]
zone = "us-central1-a"
gpu = "V100-16"
gpus_per_machine = 1
gpus = 9
"""


class Planner(Protocol):
    """Whom heads ask."""

    def propose(
        self, nodes: Sequence[NodeRecord], running: GenerationRecord | None, *, is_safe: bool
    ) -> Proposal | str:
        """A plan for some of the nodes, or why there is none."""


def paced(found: Proposal, step_s: float) -> Proposal:
    """The same, with what steps take in this world.

    Each member has one rank, and all the same to do; it takes twice as long as is predicted.
    """
    busy = Busy((step_s / 2,) * len(found.members))
    return replace(found, iteration_s=step_s, move_s=MOVE_S, busy=busy)


class QuickPlanner:
    """All nodes in their order, if there are at least two."""

    def propose(
        self, nodes: Sequence[NodeRecord], running: GenerationRecord | None, *, is_safe: bool
    ) -> Proposal | str:
        if len(nodes) < MEMBERS_MIN:
            return f"{len(nodes)} nodes are too few"
        members = tuple(sorted(node.id for node in nodes))
        if is_safe:
            members = members[:MEMBERS_MIN]
        gain = running is None or len(members) > len(running.members)
        return Proposal("plan:" + ",".join(members), members, gain, "as many nodes")


class RealPlanner:
    """The planner as sailord asks it; the same question about other nodes is asked once.

    Its predictions are for real machines; those of this world step in another time.
    """

    def __init__(self) -> None:
        self.plans: dict[str, tuple[bytes, tuple[NodeRecord, ...]]] = {}

    def propose(
        self, nodes: Sequence[NodeRecord], running: GenerationRecord | None, *, is_safe: bool
    ) -> Proposal | str:
        text, ran_on = (None, ()) if running is None else self.plans[running.plan]
        names = sorted({node.id for node in (*nodes, *ran_on)})
        to = {name: f"node-{place:02}" for place, name in enumerate(names)}
        back = {alias: name for name, alias in to.items()}
        found = _answer(
            tuple(_as_asked(node, to) for node in nodes),
            None if text is None else _renamed(text, to),
            tuple(_as_asked(node, to) for node in ran_on),
            is_safe,
        )
        if isinstance(found, str):
            return found
        members = tuple(NodeId(back[id_]) for id_ in found.proposal.members)
        plan = _renamed(found.plan, back)
        proposal = replace(
            found.proposal,
            plan=f"{found.proposal.plan}:{','.join(members)}",
            members=members,
        )
        used = tuple(node for node in (*nodes, *ran_on) if node.id in members)
        self.plans[proposal.plan] = (plan, tuple(dict.fromkeys(used)))
        return proposal


def _as_asked(node: NodeRecord, to: dict[NodeId, str]) -> NodeRecord:
    alias = to[node.id]
    return replace(node, id=NodeId(alias), name=alias, address="", state="ready", leaves_at=None)


def _renamed(text: bytes, to: dict[NodeId, str] | dict[str, NodeId]) -> bytes:
    names = "|".join(re.escape(name) for name in to)
    table = {str(old): str(new) for old, new in to.items()}
    return re.sub(rf'"({names})"', lambda m: f'"{table[m[1]]}"', text.decode()).encode()


@lru_cache(maxsize=4096)
def _answer(
    nodes: tuple[NodeRecord, ...],
    running: bytes | None,
    ran_on: tuple[NodeRecord, ...],
    is_safe: bool,  # a key of the memory of answers
) -> FoundPlan | str:
    return answer(PlanRequest(SPEC, _cluster_file(), None, nodes, running, ran_on, is_safe))


@lru_cache(maxsize=1)
def _cluster_file() -> Path:
    path = Path(tempfile.mkdtemp(prefix="sailor-sim-")) / "cluster.toml"
    path.write_text(CLUSTER, encoding="utf-8")
    return path
