"""Carries out a handover: nodes drain in the part that gives them, then change hands.

A node goes when it is as safe to stop as one that an operator drains: no open generation has it,
and no step needs its memory. Nothing is lost by that, and no second protocol is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from agents.protocol.records import JobId, NodeId
from sailord.core.model.commands import Command, Note
from sailord.core.model.nodes import UNTROUBLED, Node, Nodes
from sailord.core.model.phases import Held, Waiting
from sailord.core.model.rule import write_job
from sailord.core.model.state import State
from sailord.core.queries.active_job import is_writing
from sailord.core.queries.drain_status import drained
from sailord.core.queries.replan_triggers import first_few, usable
from sailord.core.queries.timeouts import adopted_start_s, running_step_s, stop_s
from sailord.core.sharing.parts import Handover, Parts, PartsChange, nodes_in_all

K = TypeVar("K")
V = TypeVar("V")


def begin(parts: Parts, to: JobId, ids: tuple[NodeId, ...]) -> PartsChange:
    """Let nodes drain, to give them to this job."""
    now = parts.first.now
    parts = _mark(replace(parts, handover=Handover(to, ids, now)), ids, now)
    return PartsChange(parts, (Note(f"{_names(parts, ids)}: to be handed to {to}", to),))


def continue_handover(parts: Parts, handover: Handover) -> PartsChange:
    """Move the nodes that are free to go; end the handover if it is done, or cannot be."""
    ids = tuple(id_ for id_ in handover.nodes if _is_under_way(parts, id_))
    queued = parts.first.jobs.get(handover.to)
    is_new = queued is not None and queued.state == "queued"
    if why := _why_ended(parts, handover, ids, is_new=is_new):
        return _take_back(parts, handover, ids, why)
    free = tuple(id_ for id_ in ids if _is_free(parts, id_))
    if not free or (is_new and free != ids):
        return PartsChange(parts)
    left = tuple(id_ for id_ in ids if id_ not in free)
    parts = replace(parts, handover=replace(handover, nodes=left) if left else None)
    parts = replace(parts, dealt_at=parts.first.now)
    told = Note(f"{_names(parts, free)}: handed to {handover.to}", handover.to)
    change = _with_new_part if is_new else _move
    parts, commands = change(parts, handover.to, free)
    return PartsChange(parts, (*commands, told))


def announced(parts: Parts) -> PartsChange:
    """Tell agents which nodes leave their job, so that no replica goes there any more."""
    commands: tuple[Command, ...] = ()
    handover = parts.handover
    for key in (None, *parts.others):
        part = parts.of_job(key)
        for job in part.jobs.values():
            is_to = handover is not None and handover.to == job.id
            coming = handover.nodes if handover is not None and is_to else ()
            if job.coming != coming:
                part, written = write_job(part, replace(job, coming=coming))
                parts, commands = parts.with_part(key, part), (*commands, *written)
    return PartsChange(parts, commands)


def joined(first: State, part: State) -> State:
    """Return the first part with the nodes, orders and records of one that has ended."""
    return replace(
        _add_nodes(first, part.nodes),
        jobs={**first.jobs, **part.jobs},
        generations={**first.generations, **part.generations},
        durables={**first.durables, **part.durables},
        rollbacks={**first.rollbacks, **part.rollbacks},
        known_orders=first.known_orders | part.known_orders,
    )


def _is_under_way(parts: Parts, id_: NodeId) -> bool:
    """Whether the node still drains for it: it is neither lost, nor another life, nor moved."""
    node = parts.of_node(id_).nodes.get(id_)
    return node is not None and not node.is_lost and node.exclusion.yields_since is not None


def _why_ended(parts: Parts, handover: Handover, ids: tuple[NodeId, ...], *, is_new: bool) -> str:
    """Return why nothing more will change hands; empty while something may."""
    active = parts.first.active
    is_first = active is not None and active.job == handover.to
    if handover.to not in parts.others and not is_first and (not is_new or active is None):
        return f"{handover.to} does not need them any more"
    if not ids:
        return "the nodes are lost"
    givers = [parts.of_job(key) for key in dict.fromkeys(parts.key_of(id_) for id_ in ids)]
    if parts.first.now >= handover.since + max(map(_limit_s, givers)):
        return "they are not free in time"
    return next(filter(None, (_why_kept(giver, handover.since) for giver in givers)), "")


def _limit_s(giver: State) -> float:
    """Return the time limit for a part's job to move, and to save a step where it goes on."""
    options, active = giver.options, giver.active
    if active is None or active.generation is None:
        return options.plan_s + options.stop_s + options.start_s
    # The next generation's first step is not saved; it saves one every ``memory_every`` steps.
    saving_s = (2 + active.generation.memory_every) * running_step_s(active)
    starting_s = adopted_start_s(options, active.generation)
    return options.plan_s + stop_s(options, active) + starting_s + saving_s


def _why_kept(giver: State, since: float) -> str:
    """Return why the job of a part cannot give up its draining nodes; empty if it may."""
    active = giver.active
    if active is None:
        return ""
    if isinstance(active.phase, Held):
        return f"{active.job} is held"
    nodes, asked = frozenset(usable(giver, active)), active.asked
    if isinstance(active.phase, Waiting) and not nodes:
        return f"{active.job} has no other node"
    is_refused = asked.is_refused and asked.nodes == nodes
    is_last_resort = asked.is_last_resort and asked.at >= since
    if is_last_resort or is_refused:
        return f"{active.job} has no plan without them"
    return ""


def _take_back(parts: Parts, handover: Handover, ids: tuple[NodeId, ...], why: str) -> PartsChange:
    now = parts.first.now
    parts = _mark(parts, ids, None)
    too_few = {**parts.too_few, handover.to: nodes_in_all(parts)}
    parts = replace(parts, handover=None, dealt_at=now, too_few=too_few)
    if not ids:
        return PartsChange(parts)
    return PartsChange(parts, (Note(f"{_names(parts, ids)}: not handed over: {why}", handover.to),))


def _is_free(parts: Parts, id_: NodeId) -> bool:
    """Return whether the node can go: while a record is being stored, that may still name it."""
    giver = parts.of_node(id_)
    if giver.nodes[id_].absent_since is not None:
        return False
    is_stored = giver.active is None or not is_writing(giver.active)
    return is_stored and id_ in drained(giver)


def _with_new_part(parts: Parts, job: JobId, ids: tuple[NodeId, ...]) -> PartsChange:
    """Give a queued job a part of its own, in which the rules make it the active one."""
    parts, nodes, commands = _take_out_nodes(parts, ids)
    first = parts.first
    part = replace(
        first,
        nodes=Nodes(),
        jobs={job: replace(first.jobs[job], part=tuple(sorted(nodes)), coming=())},
        generations=_pick(first.generations, job),
        durables=_pick(first.durables, job),
        rollbacks=_pick(first.rollbacks, job),
        active=None,
    )
    first = replace(
        first,
        jobs=_leave_out(first.jobs, job),
        generations=_leave_out(first.generations, job),
        durables=_leave_out(first.durables, job),
        rollbacks=_leave_out(first.rollbacks, job),
    )
    others = {**parts.others, job: _add_nodes(part, nodes)}
    return PartsChange(replace(parts, first=first, others=others), commands)


def _move(parts: Parts, to: JobId, ids: tuple[NodeId, ...]) -> PartsChange:
    """Move nodes to a part; each record that is written is right by itself."""
    parts, nodes, commands = _take_out_nodes(parts, ids)
    if to not in parts.others:
        return PartsChange(replace(parts, first=_add_nodes(parts.first, nodes)), commands)
    receiver = _add_nodes(parts.others[to], nodes)
    named = parts.others[to].jobs[to].part or ()
    kept = {id_ for id_ in named if id_ in receiver.nodes}  # Others were lost and are forgotten.
    record = replace(receiver.jobs[to], part=tuple(sorted({*kept, *nodes})))
    receiver, written = write_job(receiver, record)
    return PartsChange(parts.with_part(to, receiver), (*commands, *written))


def _take_out_nodes(
    parts: Parts, ids: tuple[NodeId, ...]
) -> tuple[Parts, Nodes, tuple[Command, ...]]:
    """Take nodes out of their parts: no record names them then, and the first part may have them.

    Written before what names them next.
    """
    nodes, commands = Nodes(), list[Command]()
    for key in dict.fromkeys(parts.key_of(id_) for id_ in ids):
        giver = parts.of_job(key)
        nodes.update((id_, giver.nodes[id_]) for id_ in ids if id_ in giver.nodes)
        giver = replace(giver, nodes=Nodes(_leave_out(giver.nodes, *ids)))
        if key is not None:
            job = giver.jobs[key]
            left = tuple(id_ for id_ in job.part or () if id_ not in ids)
            giver, written = write_job(giver, replace(job, part=left))
            commands += written
        parts = parts.with_part(key, giver)
    return parts, nodes, tuple(commands)


def _add_nodes(part: State, nodes: Mapping[NodeId, Node]) -> State:
    """Add nodes as new ones: what was known of them for another job no longer holds."""
    fresh = {
        id_: replace(node, workers=UNTROUBLED, exclusion=replace(node.exclusion, yields_since=None))
        for id_, node in nodes.items()
    }
    part = replace(part, nodes=part.nodes.with_(fresh))
    if part.active is None:
        return part
    asked = replace(part.active.asked, nodes=part.active.asked.nodes - nodes.keys())
    return replace(part, active=replace(part.active, asked=asked))


def _mark(parts: Parts, ids: Iterable[NodeId], since: float | None) -> Parts:
    """Let nodes drain for a handover since that moment; ``None``: they no longer drain."""
    for key in dict.fromkeys(parts.key_of(id_) for id_ in ids):
        part = parts.of_job(key)
        marked = {}
        for id_ in ids:
            if (node := part.nodes.get(id_)) is not None:
                exclusion = replace(node.exclusion, yields_since=since)
                back = node.returned_at if since is not None else part.now
                marked[id_] = replace(node, exclusion=exclusion, returned_at=back)
        parts = parts.with_part(key, replace(part, nodes=part.nodes.with_(marked)))
    return parts


def _names(parts: Parts, ids: Iterable[NodeId]) -> str:
    return first_few([parts.of_node(id_).nodes[id_].record.name for id_ in ids], ", ")


def _pick(records: Mapping[K, V], key: K) -> dict[K, V]:
    return {key: records[key]} if key in records else {}


def _leave_out(records: Mapping[K, V], *keys: K) -> dict[K, V]:
    return {key: value for key, value in records.items() if key not in keys}
