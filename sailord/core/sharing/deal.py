"""What should change hands: each job that can run has about as many nodes as its weight says.

Jobs come to their parts in the order of the queue. Nodes go from the largest part, by weight, to
the smallest, and only as many as leave the order of the two as it was, so that the deals end. A job
without a plan for its part goes back to the queue, and tries again once there are more nodes.
"""

from __future__ import annotations

from agents.protocol.records import JobId, JobRecord, NodeId
from sailord.core.model.phases import Held, Running, Starting, Waiting
from sailord.core.model.state import State
from sailord.core.queries.job_queue import next_in_queue, queue_order
from sailord.core.queries.replan_triggers import usable
from sailord.core.queries.restore_choice import unsaved_steps
from sailord.core.sharing.parts import Parts, nodes_in_all, nodes_of

Wanted = tuple[JobId, tuple[NodeId, ...]]
"""A job, and the nodes to give to it."""


def next_handover(parts: Parts) -> Wanted | None:
    """Return what should change hands next; ``None``: nothing."""
    if parts.first.unreadable:
        return None  # A job that cannot be read may have any of the nodes.
    return _for_newcomer(parts) or _to_the_smallest(parts)


def job_to_recall(parts: Parts) -> JobId | None:
    """Return the job that has to wait in line again, so that others have the nodes."""
    there = [part for part in parts.others.values() if _may_be_recalled(part)]
    there.sort(key=lambda part: queue_order(part.job), reverse=True)
    waiting = [part.job.id for part in there if _is_without_plan(part)]
    if waiting:
        return waiting[0]
    is_needed = bool(there) and _is_without_plan(parts.first)
    is_later = is_needed and queue_order(there[0].job) > queue_order(parts.first.job)
    return there[0].job.id if is_later else None


def _for_newcomer(parts: Parts) -> Wanted | None:
    """The next job of the queue, while all jobs with a part train, or are held."""
    job = next_in_queue(parts.first)
    if job is None or parts.first.active is None:
        return None
    there = [part for part in parts.all() if not _is_held(part)]
    if not there or not all(map(_trains, there)):
        return None
    if not all(_may_share(part, part.job) for part in there) or not _may_share(parts.first, job):
        return None
    count = sum(len(nodes_of(part)) for part in there)
    if count <= len(there) or nodes_in_all(parts) <= parts.too_few.get(job.id, 0):
        return None
    left = {part.job: list(_to_give(part)) for part in there}
    weights = job.weight + sum(each.weight for each in left)
    given: list[NodeId] = []
    while len(given) < max(1, int(count * job.weight / weights)):
        givers = [each for each in left if len(left[each]) > 1]
        if not givers:
            break
        largest = max(givers, key=lambda each: (len(left[each]) / each.weight, each.id))
        given.append(left[largest].pop(0))
    return job.id, tuple(given)


def _may_share(part: State, job: JobRecord) -> bool:
    """Whether all of its state is in the memory of its own nodes or in storage.

    The memory of a node that another job has by then is not asked for.
    """
    has_run = part.generations.get(job.id) is not None
    return job.saving.uri is not None and (not has_run or job.id in part.durables)


def _to_the_smallest(parts: Parts) -> Wanted | None:
    """Nodes of the largest part, or of the first one while that has no job."""
    receivers = [part for part in parts.all() if _grows(part)] if parts.others else []
    if not receivers:
        return None
    if parts.first.active is None:
        smallest = _smallest(receivers)
        free = _to_give(parts.first)
        return (smallest.job.id, free) if free and next_in_queue(parts.first) is None else None
    count = nodes_in_all(parts)
    receivers = [part for part in receivers if count > parts.too_few.get(part.job.id, 0)]
    if not receivers:
        return None
    smallest = _smallest(receivers)
    givers = [part for part in parts.all() if _trains(part) and _surplus(part, smallest) >= 1]
    if not givers:
        return None
    largest = max(givers, key=_size)
    return smallest.job.id, _to_give(largest)[: _surplus(largest, smallest)]


def _smallest(parts: list[State]) -> State:
    return min(parts, key=lambda part: (_size(part), queue_order(part.job)))


def _size(part: State) -> float:
    """Return how many nodes a part has for each unit of its job's weight."""
    return len(nodes_of(part)) / part.job.weight


def _surplus(larger: State, smaller: State) -> int:
    """Return how many nodes may go without making the smaller part the larger one."""
    has, gets = len(nodes_of(larger)), len(nodes_of(smaller))
    heavy, light = larger.job.weight, smaller.job.weight
    return min(int((has * light - gets * heavy) / (heavy + light)), has - 1)


def _to_give(part: State) -> tuple[NodeId, ...]:
    """Return a part's nodes, first those that it would give: idle ones, then the last place's."""
    generation = None if part.active is None else part.active.generation
    members = () if generation is None else generation.members
    last_first = nodes_of(part)[::-1]
    return tuple(sorted(last_first, key=lambda id_: id_ in members))


def _trains(part: State) -> bool:
    return part.active is not None and isinstance(part.active.phase, Running)


def _is_held(part: State) -> bool:
    return part.active is not None and isinstance(part.active.phase, Held)


def _grows(part: State) -> bool:
    """Whether more nodes would be of use: its job trains, or will."""
    active = part.active
    return active is not None and isinstance(active.phase, Waiting | Starting | Running)


def _may_be_recalled(part: State) -> bool:
    """Whether no step is lost by that; one that trains stops at the end of a step."""
    active = part.active
    if active is None or isinstance(active.phase, Held):
        return False
    return not isinstance(active.phase, Waiting) or not unsaved_steps(part, active)


def _is_without_plan(part: State) -> bool:
    """Whether its job has been waiting for a while, and there is no plan for its nodes, or none."""
    active = part.active
    if active is None or not isinstance(active.phase, Waiting):
        return False
    nodes, asked = frozenset(usable(part, active)), active.asked
    is_refused = asked.is_refused and asked.nodes == nodes
    is_due = part.now >= active.phase.since + part.options.additions_gather_s
    return is_due and (is_refused or not nodes)
