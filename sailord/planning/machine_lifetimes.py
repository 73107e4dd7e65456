"""What was seen of the machines: how long they live, and how old those are that do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agents.protocol.records import NodeId, NodeRecord
from planner.move_policy.node_lifetimes import History
from sailord.core.state import State

LOOK_S = 1.0
"""How often machines are counted."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a judgement of a move needs to know of the time before."""

    now_s: float = 0.0
    history: History = field(default_factory=History)
    age_s: tuple[tuple[str, float], ...] = ()
    """How long each node has been up; one that is missing has been for ever."""
    last_move_s: float | None = None
    """When the job last moved without having to."""
    settle_s: float = 30.0
    """For so long newcomers must have been up where none was lost lately."""


NOTHING_KNOWN = Past()


def pool_of(record: NodeRecord) -> str:
    """The pool of a node, by the name that the planner's histories have for it."""
    return pool_label(record.gpu, record.zone, is_spot=record.spot)


def pool_label(gpu: str, zone: str, *, is_spot: bool) -> str:
    """The name of a pool in the planner's histories."""
    return f"{gpu}@{zone}" + (" spot" if is_spot else "")


@dataclass(eq=False)
class Observed:
    """What leaders saw; it begins with the planner's beliefs."""

    history: History = field(default_factory=History)
    _up: dict[NodeId, str] = field(default_factory=dict)
    _term: int | None = None
    _looked_at: float = 0.0

    def look(self, after: State) -> None:
        """Count those that are up, and those that are gone since the last look."""
        is_same_term = after.term == self._term
        if after.term is None or (is_same_term and after.now < self._looked_at + LOOK_S):
            return
        up = {
            id_: pool_of(node.record)
            for id_, node in after.nodes.items()
            if not node.is_lost and node.record.gpus
        }
        gone = [pool for id_, pool in self._up.items() if id_ not in up and is_same_term]
        self.history = self.history.seen(after.now, up=Counter(up.values()), lost=Counter(gone))
        self._up, self._term, self._looked_at = up, after.term, after.now

    def past(self, state: State) -> Past:
        """What is known now."""
        ages = tuple((id_, state.now - node.since) for id_, node in state.nodes.items())
        settle_s = state.options.additions_gather_s
        moved_at = None if state.active is None else state.active.job.past.moved_at
        return Past(state.now, self.history, ages, moved_at, settle_s)
