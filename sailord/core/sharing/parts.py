"""Several jobs that share the cluster: each part is a ``State`` of its own.

A part has one job and its nodes, and knows of no other. The first part is what there is without
sharing: it also has the queue, the ended jobs, and each node that no other part has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agents.protocol.records import JobId, NodeId
from sailord.core.model.commands import Command
from sailord.core.model.nodes import Node, Nodes
from sailord.core.model.phases import Running
from sailord.core.model.state import State
from sailord.core.queries.job_queue import queue_order
from sailord.core.queries.leave_times import left_later


@dataclass(frozen=True, slots=True)
class Handover:
    """Nodes that drain to go to another job."""

    to: JobId
    """A job with a part, or the next one of the queue, which gets its part by this."""
    nodes: tuple[NodeId, ...]
    since: float


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts, and what changes hands."""

    first: State
    others: Mapping[JobId, State] = field(default_factory=dict)
    handover: Handover | None = None
    dealt_at: float = 0.0
    """When nodes last changed hands, or a handover was taken back."""
    looked_at: float = 0.0
    """When it was last looked for what should change hands."""
    too_few: Mapping[JobId, int] = field(default_factory=dict)
    """Jobs that did not get what they should have, and how many nodes there were in all.

    Forgotten when a job ends.
    """
    recalled: Mapping[JobId, str] = field(default_factory=dict)
    """Jobs that are being paused to wait in line again, and the id of the order that does it."""

    def all(self) -> Iterator[State]:
        """Yield the parts, the first one first."""
        yield self.first
        yield from self.others.values()

    def of_job(self, job: JobId | None) -> State:
        """Return the part of a job; the first one for all that have none."""
        return self.first if job is None else self.others.get(job, self.first)

    def key_of(self, node: NodeId) -> JobId | None:
        """Return the job whose part has the node; ``None``: the first part has it."""
        for id_, part in self.others.items():
            if node in (part.jobs[id_].part or ()):
                return id_
        return None

    def owners(self) -> dict[NodeId, JobId]:
        """Return whose part has each node that the first part does not have, as ``key_of``."""
        others = self.others.items()
        return {node: id_ for id_, part in others for node in part.jobs[id_].part or ()}

    def of_node(self, node: NodeId) -> State:
        """Return the part that has the node."""
        return self.of_job(self.key_of(node))

    def with_part(self, key: JobId | None, part: State) -> Parts:
        """Return the parts with this one replaced; ``None``: the first."""
        if key is None:
            return replace(self, first=part)
        return replace(self, others={**self.others, key: part})


class PartsChange(NamedTuple):
    """New parts, and the commands that go with them, in this order."""

    parts: Parts
    commands: tuple[Command, ...] = ()


def nodes_of(part: State) -> tuple[NodeId, ...]:
    """Return the nodes that any job could use, sorted by where they are.

    A cordoned member is none: only the job that is there may stay.
    """
    usable = [part.nodes[id_].record for id_ in part.nodes.free]
    usable.sort(key=lambda each: (each.zone, each.gpu, each.machine, each.name, each.id))
    return tuple(each.id for each in usable)


def expected_nodes(part: State) -> tuple[NodeId, ...]:
    """Return the nodes that count although no plan can use them now, sorted.

    They are being prepared, could not be so far, have no lease for the moment, or their end is
    announced and the job trains on them until then.
    """
    active, used = part.active, dict[NodeId, float]()
    if active is not None and isinstance(active.phase, Running):
        used = left_later(part, active)
    free = (id_ for id_, node in part.nodes.items() if _will_be_free(node))
    return tuple(sorted({*free, *used}))


def _will_be_free(node: Node) -> bool:
    if node.is_usable(is_member=False) or node.is_lost or node.is_draining:
        return False
    is_marked = node.exclusion.slow or node.exclusion.wrong_bits or node.is_closed_to_new_plans
    return not is_marked and not (node.report is not None and node.report.fault)


def nodes_in_all(parts: Parts) -> int:
    """Return how many nodes jobs could use, now or soon."""
    return sum(len(nodes_of(part)) + len(expected_nodes(part)) for part in parts.all())


def whole(parts: Parts) -> State:
    """Return all nodes and jobs as one state; its active job is that of the first part.

    If that has none, it is the first one of the others.
    """
    first = parts.first
    if not parts.others:
        return first
    nodes, jobs, generations = Nodes(first.nodes), dict(first.jobs), dict(first.generations)
    durables, marks, rollbacks = dict(first.durables), dict(first.marks), dict(first.rollbacks)
    orders = set(first.known_orders)
    for part in parts.others.values():
        nodes.update(part.nodes)
        jobs.update(part.jobs)
        generations.update(part.generations)
        durables.update(part.durables)
        marks.update(part.marks)
        rollbacks.update(part.rollbacks)
        orders |= part.known_orders
    active = first.active
    for part in sorted(parts.others.values(), key=lambda each: queue_order(each.job)):
        if part.active is None:
            continue
        if active is None:
            active = part.active
        elif part.active.generation is not None:
            generations[part.active.job] = part.active.generation
    return replace(
        first, nodes=nodes, jobs=jobs, generations=generations, durables=durables, marks=marks,
        rollbacks=rollbacks, known_orders=frozenset(orders), active=active,
    )  # fmt: skip


def parts_then_and_now(then: Parts, now: Parts) -> Iterator[tuple[JobId | None, State, State]]:
    """Yield each part before and after a decision; one that began or ended had no job then."""
    yield None, then.first, now.first
    for key, part in now.others.items():
        yield key, then.others.get(key, replace(part, active=None)), part
    for key, part in then.others.items():
        if key not in now.others:
            yield key, part, replace(now.first, active=None)
