"""What the controller knows of each machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from agents.protocol.records import NodeId, NodeRecord, Report
from sailord.core.standing import PRESENT, Absent, Lost, Present, Silent, Standing, Unreachable


@dataclass(frozen=True, slots=True)
class Node:
    """One life of a machine, as far as the controller knows."""

    record: NodeRecord
    since: float
    """Since when it is ready for work, or was first seen."""
    report: Report | None = None
    heard_at: float = 0.0
    standing: Standing = PRESENT
    probed_at: float | None = None
    failed_since: float | None = None
    """Its workers of the current generation failed then."""
    broken_since: float | None = None
    """Its workers lost the connection to a peer then, and are sound themselves."""
    draining_since: float | None = None
    """A notice, a drain order or the agent itself announced its departure then."""
    returned_at: float | None = None
    """What had kept it out of plans was taken back then."""
    is_cordoned: bool = False
    slow: str = ""
    """It computes slower than it should, by so much: no plan uses it till somebody says so."""

    @property
    def free_since(self) -> float:
        """Since when a plan could have it, if none has."""
        return self.since if self.returned_at is None else max(self.since, self.returned_at)

    @property
    def is_lost(self) -> bool:
        return isinstance(self.standing, Lost)

    @property
    def why_lost(self) -> str:
        return self.standing.why if isinstance(self.standing, Lost) else ""

    @property
    def is_unreachable(self) -> bool:
        """Its agent left a probe unanswered."""
        return isinstance(self.standing, Unreachable | Silent)

    @property
    def absent_since(self) -> float | None:
        """The end of its lease; ``None``: it has one."""
        match self.standing:
            case Absent(since=since) | Silent(since=since) | Lost(absent_since=since):
                return since
            case _:
                return None

    @property
    def is_unsound(self) -> bool:
        """Nothing can run there, as it says itself."""
        return bool(self.why_unsound)

    @property
    def why_unsound(self) -> str:
        """A device of it is broken, or its memory has no room for the job's snapshots."""
        return "" if self.report is None else self.report.fault or self.report.no_room

    def is_usable(self, *, is_member: bool) -> bool:
        """Whether a new plan may use it; a member may stay though it is cordoned."""
        if not isinstance(self.standing, Present | Unreachable) or self.draining_since is not None:
            return False
        if self.slow:
            return False
        if self.is_unsound:  # Its record in the store may not say so yet.
            return False
        return self.record.state == "ready" and (is_member or not self.is_cordoned)

    @property
    def is_notable(self) -> bool:
        """Something happened to it, or nothing yet, or it says so of a peer: rules look at no
        others."""
        return (
            self.report is None
            or not isinstance(self.standing, Present)
            or self.failed_since is not None
            or self.broken_since is not None
            or self.draining_since is not None
            or bool(self.report.broken_peers)
        )


class Nodes(dict[NodeId, Node]):
    """All nodes; never changed, only followed by others.

    Of thousands a few are worth a rule's attention. They are gathered once, so that what a
    decision costs grows with what happened and not with the cluster.
    """

    @cached_property
    def notable(self) -> frozenset[NodeId]:
        """Those of which something is to be said."""
        return frozenset(id_ for id_, node in self.items() if node.is_notable)

    @cached_property
    def free(self) -> tuple[NodeId, ...]:
        """Those that any plan may use, in the order of their names."""
        return tuple(sorted(id_ for id_, n in self.items() if n.is_usable(is_member=False)))

    def with_(self, fresh: Mapping[NodeId, Node]) -> Nodes:
        """The same but for these."""
        nodes = Nodes(self)
        nodes.update(fresh)
        news = {id_ for id_, node in fresh.items() if node.is_notable}
        nodes.notable = (self.notable - fresh.keys()) | news
        return nodes
