"""Which nodes should change hands between jobs: they go where they are worth more.

Each job is counted by its weight.

A part is one job with its nodes (``parts``); a stake is what it has to gain or to give (``worth``).
Jobs come to their parts in the order of the queue. Each handover raises the sum that ``worth``
names, so that they end. A job without a plan for its part goes back to the queue, and tries again
once there are more nodes.
"""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import GenerationRecord, JobId, JobRecord, NodeId
from sailord.core.model.phases import Held, Running, Starting, Waiting
from sailord.core.model.state import State
from sailord.core.queries.job_queue import next_in_queue, queue_order
from sailord.core.queries.replan_triggers import usable
from sailord.core.queries.restore_choice import unsaved_steps
from sailord.core.sharing.parts import Parts, expected_nodes, nodes_in_all, nodes_of
from sailord.core.sharing.worth import GpusOfNode, Stake, Wanted, best_handover

NO_JOB = JobId("")
"""Has the first part's nodes while that has no job."""


def next_handover(parts: Parts) -> Wanted | None:
    """Return what should change hands next; ``None``: nothing."""
    if parts.first.unreadable:
        return None  # A job that cannot be read may have any of the nodes.
    return _find_for_newcomer(parts) or _find_trade(parts)


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


def _find_for_newcomer(parts: Parts) -> Wanted | None:
    """Find nodes for the next job of the queue, once all jobs with a part train or are held."""
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
    stakes = {part.job.id: replace(_stake(parts, part), gets=False) for part in there}
    stakes[job.id] = Stake((), job.weight, _worths(parts, job), gives=False, gets=True)
    return best_handover(stakes, _kinds(parts))


def _may_share(part: State, job: JobRecord) -> bool:
    """Whether all of its state is in the memory of its own nodes or in storage.

    The memory of a node that another job has by then is not asked for.
    """
    has_run = part.generations.get(job.id) is not None
    return job.saving.uri is not None and (not has_run or job.id in part.durables)


def _find_trade(parts: Parts) -> Wanted | None:
    """Find nodes to move from part to part; from the first one alone while that has no job."""
    if not parts.others:
        return None
    stakes = {part.job.id: _stake(parts, part) for part in parts.all() if part.active is not None}
    if parts.first.active is None:
        if next_in_queue(parts.first) is not None:
            return None
        stakes = {id_: replace(stake, gives=False) for id_, stake in stakes.items()}
        stakes[NO_JOB] = Stake(_to_give(parts.first), 0.0, {}, gives=True, gets=False)
    else:
        count = nodes_in_all(parts)
        full = (id_ for id_, too_few in parts.too_few.items() if count <= too_few)
        stakes |= {id_: replace(stakes[id_], gets=False) for id_ in full if id_ in stakes}
    return best_handover(stakes, _kinds(parts))


def _stake(parts: Parts, part: State) -> Stake:
    """Return what a job has in its part; more nodes are of use if it trains, or will."""
    worths, nodes = _worths(parts, part.job), _to_give(part)
    gets = part.active is not None and isinstance(part.active.phase, Waiting | Starting | Running)
    return Stake(
        nodes, part.job.weight, worths, gives=_trains(part), gets=gets, stays=expected_nodes(part)
    )


def _worths(parts: Parts, job: JobRecord) -> dict[str, float]:
    """Return what one GPU of each kind is worth to a job: as for others where it never ran."""
    known: dict[str, float] = {}
    for part in (*parts.others.values(), parts.first):
        known |= _read_worths(None if part.active is None else part.active.generation)
    return known | _read_worths(_last_generation(parts.of_job(job.id), job.id))


def _last_generation(part: State, job: JobId) -> GenerationRecord | None:
    if part.active is not None and part.active.job == job:
        return part.active.generation
    return part.generations.get(job)


def _read_worths(record: GenerationRecord | None) -> dict[str, float]:
    return {} if record is None else {gpu: worth for gpu, worth in record.worths if worth > 0}


def _kinds(parts: Parts) -> dict[NodeId, GpusOfNode]:
    return {
        # A new leader does not know the GPUs of a node that it has not seen yet.
        id_: (part.nodes[id_].record.gpu, max(part.nodes[id_].record.gpus, 1))
        for part in parts.all()
        for id_ in (*part.nodes.free, *expected_nodes(part))
    }


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


def _may_be_recalled(part: State) -> bool:
    """Whether no step is lost by that; one that trains stops at the end of a step."""
    active = part.active
    if active is None or isinstance(active.phase, Held):
        return False
    return not isinstance(active.phase, Waiting) or not unsaved_steps(part, active)


def _is_without_plan(part: State) -> bool:
    """Whether its job has been waiting for a while, and there is no plan for its nodes, or none.

    While some are being prepared, it waits for them.
    """
    active = part.active
    if active is None or not isinstance(active.phase, Waiting):
        return False
    nodes, asked = frozenset(usable(part, active)), active.asked
    is_refused = asked.is_refused and asked.nodes == nodes
    is_due = part.now >= active.phase.since + part.options.additions_gather_s
    return is_due and (is_refused or not (nodes or expected_nodes(part)))
