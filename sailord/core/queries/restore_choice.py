"""Chooses the point that the next generation begins from, and which snapshots may be released."""

from __future__ import annotations

from agents.protocol.records import Durable, JobId, NodeId, Point, Restore, Sealed
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Held, Opening, Waiting
from sailord.core.model.standing import Unreachable
from sailord.core.model.state import Active, State
from sailord.core.queries.replan_triggers import next_order, usable, why_no_node
from sailord.core.queries.restore_point import (
    failure_domains,
    fallback_point,
    piece_holders,
    release_point,
    restore_point,
    safe_points,
    single_holders,
)
from sailord.core.queries.sealing import awaits_seals


def holders_reported(state: State, active: Active) -> bool:
    """Return whether every possible snapshot holder has reported all that it holds, or timed out.

    A new leader does not know yet what is in the nodes' memory; a node without a lease may be cut
    off from the store alone; and survivors of a loss may still seal their state.
    """
    if active.generation is None:
        return True
    if awaits_seals(state, active) or _speak_of_another(state, active):
        return False
    members = (state.nodes.get(id_) for id_ in active.generation.members)
    heard = all(n is None or n.is_lost or _speaks(n) or ignores_probes(state, n) for n in members)
    # Unused nodes may hold replicas, too.
    return heard and not any(
        node.report is None and node.absent_since is None and not ignores_probes(state, node)
        for node in state.nodes.values()
        if not node.is_lost
    )


def _speak_of_another(state: State, active: Active) -> bool:
    """Return whether a node still reports about another job, and may hold snapshots of this one.

    Agents report what they hold of a job only after reading in the store that it has the cluster.
    """
    phase, last = active.phase, active.generation
    if not isinstance(phase, Waiting) or last is None or last.state != "closed":
        return False
    return state.now < phase.since + state.options.turn_s and any(
        node.report is not None and node.report.job not in {None, active.job}
        for node in state.nodes.values()
        if not node.is_lost and node.absent_since is None
    )


def ignores_probes(state: State, node: Node) -> bool:
    """Return whether it has a lease, had time to report, and left a probe unanswered.

    A firewall may block it, or its clock be far from ours.
    """
    is_over = state.now >= state.trusted_since(node)
    return isinstance(node.standing, Unreachable) and is_over


def _speaks(node: Node) -> bool:
    """Return whether its agent reports, even if its lease has expired."""
    is_there = node.absent_since is None or node.heard_at > node.absent_since
    return node.report is not None and is_there


def in_memory(state: State, job: JobId) -> tuple[tuple[NodeId, Sealed], ...]:
    """Return a job's snapshots in the memory of live nodes."""
    return tuple(
        (id_, sealed)
        for id_, node in sorted(state.nodes.items())
        if node.report is not None and not node.is_lost and _speaks(node)
        if node.report.job in {None, job}
        for sealed in node.report.sealed
    )


def restore_now(state: State, active: Active) -> tuple[Restore, Durable | None]:
    """Return the restore point, and an older checkpoint if that is to count as the newest."""
    durable = state.durables.get(active.job)
    lowers = None
    check = active.checkpointing.check
    if check is not None and check.of == durable and check.found not in {None, durable}:
        durable = lowers = check.found
    order = next_order(active)
    if order is not None and order.durable is not None:
        return Restore(order.durable.point, "durable"), order.durable
    restore = restore_point(
        in_memory(state, active.job),
        layers=state.job.layers,
        atoms=state.job.atoms,
        last=active.generation,
        durable=durable,
    )
    return restore, lowers


def resume_point(state: State, id_: JobId) -> Point:
    """Return where a job that does not have the cluster would go on."""
    return _resume(state, id_).point


def _resume(state: State, id_: JobId) -> Restore:
    rollback = state.rollbacks.get(id_)
    if rollback is not None and rollback.durable is not None:
        return Restore(rollback.durable.point, "durable")
    job = state.jobs[id_]
    return restore_point(
        in_memory(state, id_),
        layers=job.layers,
        atoms=job.atoms,
        last=state.generations.get(id_),
        durable=state.durables.get(id_),
    )


def newer_in_memory(state: State, id_: JobId) -> int | None:
    """Return the step from which a job would go on, if only nodes' memory has it."""
    active = state.active
    if active is not None and active.job == id_:
        restore, _ = restore_now(state, active)
    else:
        restore = _resume(state, id_)
    durable = state.durables.get(id_)
    is_newer = durable is None or restore.point.step > durable.point.step
    return restore.point.step if restore.source == "memory" and is_newer else None


def why_not_from_start(state: State, active: Active, restore: Restore) -> str:
    """Return why the job may not restart from step 0 without an order; empty if it may.

    A job that has done at most ``steps_of_health`` steps may.
    """
    last, limit = active.generation, state.options.steps_of_health
    if restore.source != "start" or last is None:
        return ""
    if active.may_start_over or state.job.saving.start_over:
        return ""
    stopped = 0 if last.stop_at is None else last.stop_at - 1
    done = max(active.progress.step, last.restore.point.step, stopped)
    if done <= limit:
        return ""
    where = "has no readable checkpoint" if state.job.saving.uri else "names no checkpoint place"
    return (
        f"every copy of its state in nodes' memory, of {done} steps, is lost, and it "
        f"{where}; a resume begins again from step 0"
    )


def unsaved_steps(state: State, active: Active) -> range:
    """Return the steps that only the memory of nodes holds."""
    restore, lowers = restore_now(state, active)
    durable = lowers or state.durables.get(active.job)
    first = 1 if durable is None else durable.point.step + 1
    return range(first, restore.point.step + 1 if restore.source == "memory" else first)


def why_queue_stands(state: State) -> str:
    """Return why the job that has the cluster keeps it without training, and what ends that."""
    active = state.active
    if active is None and state.unreadable:
        jobs = ", ".join(sorted(state.unreadable))
        return f"sailord cannot read the records of {jobs}, which may have the cluster"
    if active is not None and isinstance(active.phase, Waiting) and not usable(state, active):
        return f"{active.job} has the cluster, and {why_no_node(state)}"
    if active is None or not isinstance(active.phase, Held):
        return ""
    steps = unsaved_steps(state, active)
    if not steps:
        return (
            f"{active.job} is held: {active.phase.reason}; the next job gets the cluster once all "
            "nodes have reported their snapshots, and its workers have ended"
        )
    only = f"step {steps[0]} is" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} are"
    return (
        f"{active.job} is held: {active.phase.reason}. It keeps the cluster since {only} only in "
        f"its nodes' memory: `sailorctl resume {active.job}` tries again, `sailorctl pause "
        f"{active.job}` gives the cluster away, though these steps may be lost then, and "
        f"`sailorctl cancel {active.job}` ends it"
    )


def release_now(state: State) -> Point | None:
    """Return the point before which snapshots may be released; ``None``: release none."""
    active = state.active
    if active is None or active.generation is None or isinstance(active.phase, Opening):
        return None
    safe = _safe_points(state, active, state.durables.get(active.job))
    point = release_point(safe, active.generation)
    if point is not None and active.checkpointing.securing is not None:
        point = min(point, active.checkpointing.securing.point)
    return point


def fallback_now(
    state: State, active: Active, restore: Restore, lowers: Durable | None = None
) -> Point | None:
    """Return the only other point of past generations that one which begins from ``restore`` needs,
    until a point of its own is safe.

    ``lowers`` counts as the newest checkpoint, since that cannot be read.

    ``None``: it may need all. A job that must survive the loss of a zone has three such points: a
    node's loss leaves a newer one than a zone's.
    """
    if state.job.saving.survive == "zone":
        return None
    layers, atoms = state.job.layers, state.job.atoms
    complete = single_holders(piece_holders(in_memory(state, active.job)), layers, atoms)
    # A checkpoint that cannot be read sends the job back to what is in memory.
    newest = lowers or state.durables.get(active.job)
    durable = newest if restore.source == "memory" else None
    safe = _safe_points(state, active, durable)
    return fallback_point(safe, complete, restore, active.generation)


def _safe_points(state: State, active: Active, durable: Durable | None) -> set[Point]:
    """Return the points that survive the loss of one failure domain."""
    return safe_points(
        in_memory(state, active.job),
        state.job.layers,
        state.job.atoms,
        durable=durable,
        domains=failure_domains(_copy_zones(state, active), state.job.saving.survive),
    )


def safe_point(state: State, released: Point | None) -> Point | None:
    """Return the newest point that survives the loss of any one node; ``None``: not known.

    ``released`` is up to where snapshots may be released. A lone node may release snapshots though
    its loss takes all copies: then only a checkpoint is safe.
    """
    active = state.active
    if active is None or len(_copy_zones(state, active)) > 1:
        return released
    durable = state.durables.get(active.job)
    return None if durable is None else durable.point


def _copy_zones(state: State, active: Active) -> dict[NodeId, str]:
    """Return the zones of all nodes that hold replicas, or could: members and unused nodes.

    A member without a lease may come back; its copies count until it is lost.
    """
    members = frozenset(() if active.generation is None else active.generation.members)
    return {
        id_: node.record.zone
        for id_, node in state.nodes.items()
        if not node.is_lost
        if id_ in members or (node.absent_since is None and node.record.state == "ready")
    }
