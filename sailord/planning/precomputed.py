"""Plans computed in advance: the answer to each likely loss of nodes of the running plan."""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass, field, replace

from agents.protocol.records import NodeRecord
from planner.replan.past_moves import corrected, phase_factors
from sailord.planning.messages import FoundPlan, PlanRequest


@dataclass(frozen=True, slots=True)
class NextPlan:
    """The plan that would follow a loss, in short."""

    nodes: int
    gpus: int
    step_s: float
    """The predicted duration of a step, without what running steps correct."""


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Why no plan would follow a loss."""

    why: str


@dataclass(eq=False)
class PrecomputedPlans:
    """Next plans by lost nodes, for one running plan."""

    request: PlanRequest
    by_loss: dict[frozenset[str], tuple[frozenset[str], bytes]] = field(default_factory=dict)
    """By the ids of the lost nodes: the nodes of the next plan, and the compressed answer."""
    following: dict[frozenset[str], NextPlan | NoPlan] = field(default_factory=dict)
    """By the ids of the lost nodes."""
    used: frozenset[str] = frozenset()
    """Nodes of the running plan."""
    size_bytes: int = 0

    def add(self, lost: frozenset[str], used: frozenset[str], found: FoundPlan | str) -> None:
        """Store the answer to a loss; one without a plan is told, and asked again when it comes."""
        self.used = used
        if isinstance(found, str):
            self.following[lost] = NoPlan(found)
            return
        packed = zlib.compress(pickle.dumps(found), 1)
        self.by_loss[lost] = frozenset(found.proposal.members), packed
        self.size_bytes += len(packed)
        plan = found.proposal
        plain_s = plan.iteration_s if plan.plain_s is None else plan.plain_s
        self.following[lost] = NextPlan(len(plan.members), len(plan.peaks), plain_s)

    def answer(self, request: PlanRequest) -> FoundPlan | None:
        """Return the stored answer to this request, if there is one.

        As all answers that were found in a hurry, it is soon reconsidered, also if nodes have
        joined since. It predicts the move after a loss: not that away from nodes that go on.
        """
        ours = self.request
        if (
            request.leaving
            or request.slow
            or _identify_question(request) != _identify_question(ours)
        ):
            return None
        as_known = set(map(_describe_node, ours.nodes))
        new = {node.id for node in request.nodes} - {node.id for node in ours.nodes}
        # A node whose restarted agent has found other devices counts as lost.
        there = {n.id for n in request.nodes if n.id in new or _describe_node(n) in as_known}
        lost = frozenset(node.id for node in ours.nodes if node.id not in there)
        # Losing unused nodes as well (a whole zone, a spare) does not change the answer.
        for each in (lost, lost & self.used):
            nodes, packed = self.by_loss.get(each, (frozenset[str](), b""))
            if packed and nodes <= there:
                found = pickle.loads(zlib.decompress(packed))
                assert isinstance(found, FoundPlan)
                return _predict_anew(found, request)
        return None


def _identify_question(request: PlanRequest) -> tuple[object, ...]:
    """Return what an answer depends on, besides the nodes.

    Not links that were measured since: an answer at once is worth more, and the planner is asked
    again after ``reconsider_s``.
    """
    return request.running, request.spec, request.keeps_deadline, request.usd_max, request.prices


def _describe_node(node: NodeRecord) -> tuple[object, ...]:
    """Return what a plan needs to know of a node."""
    return node.id, node.zone, node.machine, node.gpu, node.gpus, node.spot


def _predict_anew(found: FoundPlan, request: PlanRequest) -> FoundPlan:
    """Correct the predicted move by moves that ended after the answer was computed."""
    before, move = found.proposal, found.about["move"]
    factors = phase_factors(request.past.moves, is_planned=False)
    phases = corrected(dict(before.move_uncorrected), factors)
    more_s = sum(phases.values()) - sum(seconds for _, seconds in before.move_phases)
    seconds = max(before.move_s + more_s, 0.0)
    proposal = replace(before, move_s=seconds, move_phases=tuple(phases.items()))
    told = {
        **move,
        "seconds": seconds,
        "downtime_s": max(move["downtime_s"] + more_s, 0.0),
        "phases": {f"{name}_s": each for name, each in phases.items()},
    }
    return replace(found, proposal=proposal, about={**found.about, "move": told})
