"""A node's life: seen, reported, marked by orders, given up as lost, forgotten.

``_why_lost`` decides that a node is lost, and ``observe_nodes`` if a new agent has registered under
its name; ``standing`` is the table of a node's states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agents.protocol.records import (
    PREPARING,
    GenerationRecord,
    NodeId,
    NodeRecord,
    Order,
    Report,
)
from agents.protocol.versions import why_incompatible
from sailord.core.model import standing
from sailord.core.model.nodes import UNTROUBLED, Exclusion, Node, Nodes, WorkerTrouble
from sailord.core.model.phases import Running
from sailord.core.model.state import Active, Progress, State

UNREADABLE = "sailord cannot read its record: upgrade sailord first, or read its log"


def observe_nodes(
    state: State,
    records: Iterable[NodeRecord],
    unreadable: frozenset[NodeId] = frozenset(),
    elsewhere: Iterable[NodeRecord] = (),
) -> State:
    """Take in all nodes that have a lease at this moment; the others have none.

    An ``unreadable`` node is only known to hold a lease: it keeps its last record, and no new plan
    uses it. ``elsewhere``: nodes of other jobs, which may be new lives of these. A node is lost
    once another id has its name.
    """
    seen = {record.id: record for record in records}
    fresh: dict[NodeId, Node] = {}
    protocols = {record.protocol for record in seen.values()}
    version_problems = {
        each: why_incompatible(each, other_is="its agent", this_is="sailord") for each in protocols
    }
    for record in seen.values():
        node = _with_lease(state, record, version_problems[record.protocol])
        if node is not state.nodes.get(record.id):
            fresh[record.id] = node
    names = {record.name: record.id for record in (*elsewhere, *seen.values())}
    for id_, node in state.nodes.items():
        if id_ in seen:
            continue
        if id_ in unreadable:
            present = standing.lease_seen(node.standing)
            if not node.exclusion.record_problem or node.standing != present:
                exclusion = replace(node.exclusion, record_problem=UNREADABLE)
                fresh[id_] = replace(node, standing=present, exclusion=exclusion)
            continue
        if names.get(node.record.name, id_) != id_ and not node.is_lost:
            fresh[id_] = _give_up(node, state.now, "its agent was restarted")
        elif node.absent_since is None:
            fresh[id_] = replace(node, standing=standing.lease_ended(node.standing, state.now))
    return replace(state, nodes=state.nodes.with_(fresh)) if fresh else state


def _with_lease(state: State, record: NodeRecord, version_problem: str) -> Node:
    """Return a node that has a lease; the same object if nothing has changed."""
    node = state.nodes.get(record.id)
    if node is None:
        node = _new_node(state, record)
    elif record.state == "ready" and node.record.state == "joining":
        node = replace(node, since=state.now)
    draining = node.exclusion.draining_since
    if record.state == "draining" and draining is None:
        draining = state.now
    elif record.state != "draining" and node.record.state == "draining":
        # The agent withdrew its own notice, a false alarm or before a new start; orders stay.
        is_over = not node.exclusion.is_drain_ordered
        draining = None if is_over else draining
        node = replace(node, returned_at=state.now if is_over else node.returned_at)
    told, has_open_end = record, False
    if draining is not None:
        # Another notice may have said when the node leaves, or that it leaves earlier.
        told = replace(record, leaves_at=_choose_earlier(record.leaves_at, node.record.leaves_at))
        is_open = record.state == "draining" and record.leaves_at is None
        has_open_end = is_open or node.exclusion.has_open_end
    known = node.exclusion
    if (told, None, draining, has_open_end, version_problem) == (
        *(node.record, node.absent_since, known.draining_since),
        *(known.has_open_end, known.record_problem),
    ):
        return node
    has_moved = told.address != node.record.address
    if has_moved or node.absent_since is not None:
        # The last probe went to another address, or came before it was back.
        node = replace(node, probed_at=None)
    return replace(
        node,
        record=told,
        standing=standing.lease_seen(node.standing, has_moved=has_moved),
        exclusion=replace(
            known,
            draining_since=draining,
            has_open_end=has_open_end,
            record_problem=version_problem,
        ),
    )


def _choose_earlier(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two moments, of which either may be unknown."""
    return min((at for at in (one, other) if at is not None), default=None)


def grant_grace(state: State, members: Iterable[NodeId]) -> State:
    """Count members without a lease as absent from now on: they may be waiting for the store."""
    absent = standing.Absent(state.now)
    fresh = {
        id_: Node(NodeRecord(id_, id_, "", "", "", 0, ""), state.now, standing=absent)
        for id_ in members
        if id_ not in state.nodes
    }
    return replace(state, nodes=state.nodes.with_(fresh))


def take_reports(state: State, reports: Iterable[Report]) -> State:
    """Take in reports, all of one moment at once: the mapping of nodes is replaced once for all."""
    active, fresh = state.active, dict[NodeId, Node]()
    for report in reports:
        node = fresh.get(report.node) or state.nodes.get(report.node)
        if node is None or (node.report is not None and report.number <= node.report.number):
            continue
        active, fresh[report.node] = _take_report(state, active, node, report)
    return replace(state, nodes=state.nodes.with_(fresh), active=active) if fresh else state


def _take_report(
    state: State, active: Active | None, node: Node, report: Report
) -> tuple[Active | None, Node]:
    if node.is_lost:
        # It was given up by mistake: it starts afresh.
        node = replace(_new_node(state, node.record), standing=node.standing)
    workers = UNTROUBLED
    if active is not None and _speaks_of(active.generation, report):
        before = node.workers
        sealing_since = before.sealing_since
        if report.sealing is not None and sealing_since is None:
            sealing_since = state.now
        workers = WorkerTrouble(sealing_since=sealing_since)
        if report.taking == "failed":
            since = before.failed_since
            workers = replace(workers, failed_since=state.now if since is None else since)
        if report.taking == "broken":
            since = before.broken_since
            workers = replace(workers, broken_since=state.now if since is None else since)
        if report.step > active.progress.step:
            step_s = _step_s(active, report.step, state.now)
            active = replace(active, progress=Progress(report.step, state.now, step_s))
        if report.evaluations not in ((), active.evaluations):
            active = replace(active, evaluations=report.evaluations)
        if report.unlogged not in ("", active.unlogged):
            active = replace(active, unlogged=report.unlogged)
    is_mended = bool(node.why_unsound) and not (report.fault or report.unfit)
    heard = replace(
        node,
        report=report,
        unfit_since=_unfit_since(node, report, state.now),
        returned_at=state.now if is_mended else node.returned_at,
        heard_at=state.now,
        workers=workers,
        standing=standing.reported(node.standing),
    )
    return active, heard


def _unfit_since(node: Node, report: Report, now: float) -> float | None:
    if report.unfit in ("", PREPARING):
        return node.unfit_since if report.unfit else None
    return now if node.unfit_since is None else node.unfit_since


def _step_s(active: Active, step: int, now: float) -> float | None:
    """Moving average of a step's seconds; the first step of a generation does not count."""
    if not isinstance(active.phase, Running):
        return active.progress.step_s
    if active.progress.advanced_at <= active.phase.since:
        return active.progress.step_s
    fresh = (now - active.progress.advanced_at) / (step - active.progress.step)
    return fresh if active.progress.step_s is None else 0.9 * active.progress.step_s + 0.1 * fresh


def _speaks_of(record: GenerationRecord | None, report: Report) -> bool:
    return record is not None and report.speaks_of(record)


def probe_failed(state: State, id_: NodeId) -> State:
    """Note that an agent left a probe unanswered, unless it has reported since."""
    node = state.nodes.get(id_)
    if node is None or node.is_unreachable:
        return state
    if node.probed_at is not None and node.heard_at >= node.probed_at:
        return state  # It reported after it was probed.
    missed = replace(node, standing=standing.probe_failed(node.standing))
    return replace(state, nodes=state.nodes.with_({id_: missed}))


def _new_node(state: State, record: NodeRecord) -> Node:
    """Return a node as it is first known; what was ordered of this life of it still holds."""
    exclusion = Exclusion(is_cordoned=record.state == "cordoned")
    node = Node(record, state.now, exclusion=exclusion)
    for order in state.marks.get(record.id, ()):
        node = mark(node, order, state.now)
    return node


def mark(node: Node, order: Order, now: float) -> Node:
    """Apply a notice or an operator's order to the node."""
    exclusion = node.exclusion
    match order.kind:
        case "preempt" | "drain":
            # The earliest notice counts: its own agent, or another one, may know of a later end.
            leaves_at = _choose_earlier(order.leaves_at, node.record.leaves_at)
            is_open = order.kind == "preempt" and order.leaves_at is None
            since = now if exclusion.draining_since is None else exclusion.draining_since
            record = replace(node.record, leaves_at=leaves_at)
            is_ordered = exclusion.is_drain_ordered or order.kind == "drain"
            leaves = replace(
                exclusion,
                draining_since=since,
                has_open_end=is_open or exclusion.has_open_end,
                is_drain_ordered=is_ordered,
            )
            return replace(node, exclusion=leaves, record=record)
        case "withdraw" if order.of_notice and exclusion.is_drain_ordered:
            return replace(node, record=replace(node.record, leaves_at=None))
        case "withdraw":
            back = node.returned_at if exclusion.draining_since is None else now
            record = replace(node.record, leaves_at=None)
            stays = replace(
                exclusion, draining_since=None, has_open_end=False, is_drain_ordered=False
            )
            return replace(node, exclusion=stays, returned_at=back, record=record)
        case "cordon":
            return replace(node, exclusion=replace(exclusion, is_cordoned=True))
        case "quarantine":
            if order.wrong_bits:
                return replace(node, exclusion=replace(exclusion, wrong_bits=order.reason))
            return replace(node, exclusion=replace(exclusion, slow=order.reason))
        case _:  # "uncordon"
            was_out = exclusion.is_cordoned or exclusion.slow or exclusion.wrong_bits
            back = now if was_out else node.returned_at
            stays = replace(exclusion, is_cordoned=False, slow="", wrong_bits="")
            return replace(node, exclusion=stays, returned_at=back)


def give_up_nodes(state: State) -> State:
    """Give up nodes that count as lost; forget absent ones that no generation names."""
    nodes = state.nodes
    if not nodes.notable:
        return state
    generation = state.active.generation if state.active is not None else None
    members = frozenset(generation.members if generation is not None else ())
    notable = [(id_, nodes[id_]) for id_ in sorted(nodes.notable)]
    broken = {
        peer
        for _, node in notable
        if node.report is not None and not node.is_lost
        for peer in node.report.broken_peers
        if _speaks_of(generation, node.report)
    }
    lost: dict[NodeId, Node] = {}
    forgotten: set[NodeId] = set()
    for id_, node in notable:
        if id_ not in members and node.absent_since is not None:
            forgotten.add(id_)  # A lost node with a lease stays known as lost.
        elif not node.is_lost and (why := _why_lost(state, node, is_broken=id_ in broken)):
            lost[id_] = _give_up(node, state.now, why)
    if lost:
        state = replace(state, nodes=nodes.with_(lost))
    if forgotten:
        kept = ((id_, node) for id_, node in state.nodes.items() if id_ not in forgotten)
        state = replace(state, nodes=Nodes(kept))
    return state


def _why_lost(state: State, node: Node, *, is_broken: bool) -> str:
    """Return why a node counts as lost; empty while it may be alive.

    The end of a lease alone is no proof. All members take part in every step, so a member without
    a lease is only suspect while steps are being done, or while its agent answers a probe. This
    does not delay giving up a dead node: when its lease ends its job has made no step for
    ``last_step_s``. With a lease it is lost if a peer lost it and its agent answers no probe.
    """
    if is_broken and node.is_unreachable:
        return "a peer lost its connection and its agent does not answer"
    if node.absent_since is None:
        return ""
    assert state.active is not None
    options = state.options
    if state.now < state.trusted_since(node):
        return ""
    if state.now < max(node.absent_since, node.heard_at, state.woken_at) + options.suspect_s:
        return ""
    generation = state.active.generation
    has_stepped = (
        generation is not None and state.active.progress.step > generation.restore.point.step
    )
    waits_s = options.last_step_s(state.lease_of(node)) if has_stepped else options.suspect_s
    if state.now < state.active.progress.advanced_at + waits_s:
        return ""
    return "its lease expired and no step was done since"


def _give_up(node: Node, now: float, why: str) -> Node:
    return replace(node, standing=standing.given_up(node.standing, now, why))
