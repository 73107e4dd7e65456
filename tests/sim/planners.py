"""Planners of the simulated world: mostly a quick fake, in some lives the real one."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from agents.protocol.records import ComputeTimes, GenerationRecord, NodeId, NodeRecord
from sailord.core.model.proposal import Proposal
from sailord.planning.messages import FoundPlan, PlanRequest
from sailord.planning.plan_search import answer

MEMBERS_MIN = 2
MOVE_S = 1.5
WORTHS = (("V100-16", 1.0), ("T4", 0.4))
"""What GPUs are worth to each job."""

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
"""A job that needs two of these machines and is faster with each more."""

CHUNKED = """
[model]
family = "gpt2"
layers = 16
hidden = 2432
heads = 32
vocab = 1024
sequence = 256

[training]
global_batch = 12
sequence = 256
precision = "fp32"
max_tp = 1
micro_batches = [1]

[objective]
allow = ["interleaved"]
prefer = "fastest"
"""
"""Another one, whose plans on two, three, four and six machines have chunks, and others none."""

CLUSTER = """
[[pool]]
zone = "us-central1-a"
gpu = "V100-16"
gpus_per_machine = 1
gpus = 9
"""


class Planner(Protocol):
    """The planner's interface for heads."""

    def propose(
        self, nodes: Sequence[NodeRecord], running: GenerationRecord | None
    ) -> Proposal | str:
        """Return a plan for some of the nodes, or the reason why there is none."""


def with_step_time(found: Proposal, step_s: float) -> Proposal:
    """Return the proposal with this world's step time.

    Each member has one rank and equal work; a step takes twice the predicted time.
    """
    busy = ComputeTimes((step_s / 2,) * len(found.members))
    return replace(found, iteration_s=step_s, move_s=MOVE_S, next_move_s=MOVE_S, busy=busy)


class QuickPlanner:
    """Uses all nodes in order, if there are at least two."""

    def propose(
        self, nodes: Sequence[NodeRecord], running: GenerationRecord | None
    ) -> Proposal | str:
        if len(nodes) < MEMBERS_MIN:
            return f"{len(nodes)} nodes are too few"
        members = tuple(sorted(node.id for node in nodes))
        gain = running is None or len(members) > len(running.members)
        return Proposal("plan:" + ",".join(members), members, gain, "as many nodes", worths=WORTHS)


class RealPlanner:
    """The real planner, with answers cached for questions that differ in node names only.

    Its predictions are for real machines; steps of this world take another time.
    """

    def __init__(self, spec: str = SPEC) -> None:
        self.spec = spec
        self.plans: dict[str, tuple[bytes, tuple[NodeRecord, ...]]] = {}

    def propose(
        self, nodes: Sequence[NodeRecord], running: GenerationRecord | None
    ) -> Proposal | str:
        text, ran_on = (None, ()) if running is None else self.plans[running.plan]
        names = sorted({node.id for node in (*nodes, *ran_on)})
        to = {name: f"node-{place:02}" for place, name in enumerate(names)}
        back = {alias: name for name, alias in to.items()}
        found = _answer(
            self.spec,
            tuple(_as_asked(node, to) for node in nodes),
            None if text is None else _renamed(text, to),
            tuple(_as_asked(node, to) for node in ran_on),
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
    spec: str,
    nodes: tuple[NodeRecord, ...],
    running: bytes | None,
    ran_on: tuple[NodeRecord, ...],
) -> FoundPlan | str:
    return answer(PlanRequest(spec, _cluster_file(), None, nodes, running, ran_on))


@lru_cache(maxsize=1)
def _cluster_file() -> Path:
    path = Path(tempfile.mkdtemp(prefix="sailor-sim-")) / "cluster.toml"
    path.write_text(CLUSTER, encoding="utf-8")
    return path
