"""What the controller knows of each node: record, last report, what keeps it out of plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from agents.protocol.records import NodeId, NodeRecord, Report
from sailord.core.model.standing import (
    PRESENT,
    Absent,
    Lost,
    Present,
    Silent,
    Standing,
    Unreachable,
)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Why new plans leave the node out, other than for its standing or its own report."""

    draining_since: float | None = None
    """When a notice, a drain order or the agent itself announced its departure."""
    has_open_end: bool = False
    """One of those who announced it did not say when: it may go at any time."""
    yields_since: float | None = None
    """Since when it is drained to go to another job."""
    is_drain_ordered: bool = False
    """By an operator or for capacity: neither its agent nor the end of a notice takes that back."""
    is_cordoned: bool = False
    slow: str = ""
    """Why it is left out as a straggler; empty if it is not."""
    wrong_bits: str = ""
    """Why it is left out until an operator uncordons it: its bits were contradicted."""
    record_problem: str = ""
    """Why only new plans leave it out: its record cannot be read, or it speaks another protocol."""


@dataclass(frozen=True, slots=True)
class WorkerTrouble:
    """What ended its workers of the present generation, and since when."""

    failed_since: float | None = None
    broken_since: float | None = None
    """When its workers, which did not fail themselves, lost the connection to a peer."""
    sealing_since: float | None = None
    """When its workers first announced that they seal their state."""


UNTROUBLED = WorkerTrouble()


@dataclass(frozen=True, slots=True)
class Node:
    """One life of a node: its agent from one start to its end."""

    record: NodeRecord
    since: float
    """When it became ready for work, or was first seen."""
    report: Report | None = None
    heard_at: float = 0.0
    standing: Standing = PRESENT
    probed_at: float | None = None
    returned_at: float | None = None
    """When a drain, a cordon or a mark was taken back, or its report became sound again."""
    unfit_since: float | None = None
    """When its first attempt to prepare for the job failed; another one may be under way."""
    workers: WorkerTrouble = UNTROUBLED
    exclusion: Exclusion = Exclusion()

    @property
    def free_since(self) -> float:
        """Since when a plan could use it."""
        return self.since if self.returned_at is None else max(self.since, self.returned_at)

    @property
    def is_draining(self) -> bool:
        return self.drains_since is not None

    @property
    def drains_since(self) -> float | None:
        """Since when it drains: it will leave the cluster, or its job."""
        since, yields_since = self.exclusion.draining_since, self.exclusion.yields_since
        return yields_since if since is None else since

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
    def why_unsound(self) -> str:
        """Why the job cannot run there, by its own report: a broken device, no room, no setup."""
        return "" if self.report is None else self.report.fault or self.report.unfit

    def is_usable(self, *, is_member: bool) -> bool:
        """Whether a new plan may use it; a member may stay though it is cordoned."""
        if self.is_draining or not self._is_sound:
            return False
        return self.record.state == "ready" and (is_member or not self.is_closed_to_new_plans)

    @property
    def is_leaving(self) -> bool:
        """Whether it could go on until it leaves, where nothing else can take over."""
        return self.is_draining and self._is_sound

    @property
    def _is_sound(self) -> bool:
        if not isinstance(self.standing, Present | Unreachable):
            return False
        if self.exclusion.slow or self.exclusion.wrong_bits:
            return False
        return not self.why_unsound  # Its record in the store may not say so yet.

    @property
    def is_closed_to_new_plans(self) -> bool:
        """New plans leave it out; one that must follow what runs there already may keep it."""
        return self.exclusion.is_cordoned or bool(self.exclusion.record_problem)

    @property
    def why_unusable(self) -> str:
        """Why no new plan uses it, by its own report, its peers' or what its agent writes."""
        return self.why_unsound or self.exclusion.wrong_bits or self.exclusion.record_problem

    @property
    def is_notable(self) -> bool:
        """Rules need to look at it: it is not well, has not reported yet, or lost a peer."""
        return (
            self.report is None
            or not isinstance(self.standing, Present)
            or self.workers != UNTROUBLED
            or self.is_draining
            or bool(self.why_unusable)
            or bool(self.report.broken_peers or self.report.contradicted)
            or self.report.agreed_at is not None
        )


@dataclass(frozen=True, slots=True)
class LostNode:
    """What is known of a node after it was lost and its record is gone."""

    id: NodeId
    name: str
    at: float
    why: str
    kind: tuple[str, str]
    """Its zone and machine type."""
    address: str


class Nodes(dict[NodeId, Node]):
    """All nodes; never changed in place.

    The few that rules must look at are collected once, so that the cost of a decision grows with
    what happened and not with the size of the cluster.
    """

    @cached_property
    def notable(self) -> frozenset[NodeId]:
        """The ids of the nodes that rules must look at."""
        return frozenset(id_ for id_, node in self.items() if node.is_notable)

    @cached_property
    def free(self) -> tuple[NodeId, ...]:
        """The ids of the nodes that any plan may use, sorted."""
        return tuple(sorted(id_ for id_, n in self.items() if n.is_usable(is_member=False)))

    def with_(self, fresh: Mapping[NodeId, Node]) -> Nodes:
        """Return a copy with these nodes replaced."""
        nodes = Nodes(self)
        nodes.update(fresh)
        news = {id_ for id_, node in fresh.items() if node.is_notable}
        nodes.notable = (self.notable - fresh.keys()) | news
        return nodes
