"""Triggers of a new plan: losses, failures, notices, stragglers, new nodes, orders, time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from agents.protocol.records import (
    PREPARING,
    Durable,
    GenerationRecord,
    JobId,
    NodeId,
    Order,
    OrderKind,
)
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Running, Starting, Waiting
from sailord.core.model.standing import Lost, Present
from sailord.core.model.state import Active, State
from sailord.core.model.stragglers import Straggler
from sailord.core.queries.leave_times import leaves_from
from sailord.core.queries.straggler_queries import to_leave_out
from sailord.core.queries.timeouts import stall_s
from sailord.text.causes import NodeCause, joined_reasons, node_cause

STEERING = ("cancel", "pause", "resume")
"""Orders about whether a job goes on; the last one given counts, but a cancel before all others."""
_ON_RANK = re.compile(r"^rank \d+: ")
_OF_SAMPLE = re.compile(r", in (?:dataset|labels)\b.*")
"""The part of a failure that names the sample; ranks that fail alike name different samples."""
_CUT_OFF = " lost the connection to "
RECOVERY_S = 3.0
"""Before a first generation opens, the leader has this long to ask nodes for one that the store
lost."""
RECONSIDERED = "a better plan may exist by now"
"""Why the planner is asked if nothing has happened for long."""
NAMED_MAX = 5
"""Most things that a sentence names."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """A reason to ask for a plan, not before ``due``, so that others may join it."""

    reason: str
    due: float
    _: KW_ONLY
    is_forced: bool
    """The present generation cannot go on, or must not."""
    slow: Mapping[NodeId, Straggler] = field(default_factory=dict)
    """Stragglers to leave out."""
    is_ordered: bool = False
    """Nothing but an operator's order asks for a new plan: what runs could go on."""


def replan_trigger(state: State, active: Active) -> Trigger | None:
    """Return the most urgent trigger, joined with those due as early; ``None``: there is none."""
    if isinstance(active.phase, Waiting):
        return _first_plan(state, active, active.phase)
    added = _additions(state, active)
    found = [
        *_losses(state, active),
        *_notices(state, active),
        *_slow_nodes(state, active),
        *added,
        *_orders(active, state.now),
        *_standstill(state, active),
    ]
    if not any(trigger.is_forced for trigger in found):
        found += _quarantines(state, active)
    if not found:
        return None
    # Forced ones first: a new node never delays the answer to a loss.
    first = min(found, key=lambda trigger: (not trigger.is_forced, trigger.due, trigger.reason))
    # Each question includes the new nodes: they are named also before their own time.
    alike = [c for c in found if c.is_forced == first.is_forced]
    joined = [c for c in alike if c.due <= first.due or c in added]
    reasons = dict.fromkeys(trigger.reason for trigger in joined)
    slow = {id_: each for trigger in joined for id_, each in trigger.slow.items()}
    is_ordered = all(trigger.is_ordered for trigger in joined)
    return Trigger(
        first_few(reasons, "; "),
        first.due,
        is_forced=first.is_forced,
        slow=slow,
        is_ordered=is_ordered,
    )


def first_few(words: Collection[str], between: str) -> str:
    """Join the first ``NAMED_MAX`` of them, and say how many more there are."""
    first = list(words)[:NAMED_MAX]
    rest = len(words) - len(first)
    return between.join([*first, f"{rest} more"] if rest else first)


def _first_plan(state: State, active: Active, phase: Waiting) -> Trigger:
    """Nothing runs: plan after the gathering window."""
    options, last = state.options, active.generation
    due = max(phase.since + options.failures_gather_s, active.attempts.not_before)
    if last is None or last.state == "closed":
        ready = [state.nodes[id_].free_since for id_ in usable(state, active)]
        due = max(due, max(ready, default=state.now) + options.start_gather_s)
        if ready and any(_is_preparing(node) for node in state.nodes.values()):
            due = max(due, min(state.now, min(ready) + options.start_s) + options.start_gather_s)
        if last is None and any(_has_trained(node, active.job) for node in state.nodes.values()):
            due += RECOVERY_S
    ordered = _rollback(active)
    is_told = not ordered or ordered in phase.reason
    reason = phase.reason if is_told else f"{ordered}; {phase.reason}"
    return Trigger(joined_reasons([reason, *_lost_since(state, active)]), due, is_forced=True)


def _lost_since(state: State, active: Active) -> list[str]:
    """Return the lost members of the last generation: some may be lost while the job waits."""
    last = active.generation
    if last is None or last.state == "closed":
        return []
    lost = sorted(id_ for id_ in state.nodes.notable.intersection(last.members))
    return [_what_broke(state, id_) for id_ in lost if state.nodes[id_].is_lost][:NAMED_MAX]


def _has_trained(node: Node, job: JobId) -> bool:
    """Return whether it has heard of a generation of the job."""
    report = node.report
    return report is not None and report.job == job and report.heard.generation > 0


def _is_preparing(node: Node) -> bool:
    """Return whether it may soon be usable, once it has the job's work folder."""
    is_there = isinstance(node.standing, Present) and node.report is not None
    return is_there and node.report is not None and node.report.unfit == PREPARING


def usable(state: State, active: Active) -> tuple[NodeId, ...]:
    """Return the nodes that a new plan may use, sorted; see ``set_aside``."""
    nodes, stay = state.nodes, cordoned_members(state, active)
    return tuple(sorted((*nodes.free, *stay))) if stay else nodes.free


def cordoned_members(state: State, active: Active) -> tuple[NodeId, ...]:
    """Return the cordoned members: only a forced plan may use them, as after a loss.

    The running plan keeps them, and a better one does without them.
    """
    nodes, generation = state.nodes, active.generation
    if generation is None or generation.state == "closed":
        return ()
    kept = (id_ for id_ in generation.members if id_ in nodes)
    closed = (id_ for id_ in kept if nodes[id_].is_closed_to_new_plans)
    return tuple(id_ for id_ in closed if nodes[id_].is_usable(is_member=True))


def leaving(state: State, active: Active) -> tuple[NodeId, ...]:
    """Return the draining members on which a job that waits could go on until they leave."""
    generation = active.generation
    if generation is None or generation.state == "closed":
        return ()
    members = state.nodes.notable.intersection(generation.members)
    return tuple(sorted(id_ for id_ in members if state.nodes[id_].is_leaving))


def is_last_resort(state: State, active: Active) -> bool:
    """Return whether the job waits only since its nodes drain: it may train until they leave."""
    asked = active.asked
    if not isinstance(active.phase, Waiting) or not asked.is_refused or asked.is_last_resort:
        return False
    return asked.nodes == frozenset(usable(state, active)) and bool(leaving(state, active))


def why_no_node(state: State) -> str:
    """Return why there is no node to plan for: as the nodes report it, or what they are."""
    living = [node for _, node in sorted(state.nodes.items()) if not node.is_lost]
    unsound = [node for node in living if node.why_unusable]
    causes = [why_unsound(unsound)] if unsound else []
    kinds: dict[str, list[str]] = {}
    for node in living:
        if not node.why_unusable and (kind := _kind_of_unready(node)):
            kinds.setdefault(kind, []).append(node.record.name)
    causes += [f"{first_few(names, ', ')} {kind}" for kind, names in kinds.items()]
    return f"no node is ready: {'; '.join(causes)}" if causes else "no node is ready"


def _kind_of_unready(node: Node) -> str:
    """Return in a word why no plan may use a node that is well itself."""
    if node.absent_since is not None:
        return "suspect"
    if node.is_draining:
        return "draining"
    if node.exclusion.slow:
        return "slow"
    return "cordoned" if node.exclusion.is_cordoned else ""


def has_no_node(state: State, active: Active) -> bool:
    """Return whether there are nodes, and none is ready for the job."""
    return bool(state.nodes) and not usable(state, active)


def why_waiting(state: State, active: Active, phase: Waiting) -> str:
    """Return why the job waits, and which rollback is carried out once it need not."""
    why, ordered = phase.reason, _rollback(active)
    if has_no_node(state, active):
        why = why_no_node(state)
    elif state.nodes:
        why = with_answer(active, why)
    return f"{why}; {ordered}" if ordered and ordered not in why else why


def with_answer(active: Active, reason: str) -> str:
    """Return a reason, and why the planner has no plan if the job waits for one."""
    said = active.asked.said if isinstance(active.phase, Waiting) else ""
    return f"{reason}; {said}" if said else reason


def why_unsound(nodes: Iterable[Node]) -> str:
    """Return why nodes cannot run the job, by their own reports; each cause once."""
    by_cause: dict[str, list[str]] = {}
    for node in nodes:
        by_cause.setdefault(node.why_unusable, []).append(node.record.name)
    return first_few([f"{first_few(names, ', ')}: {why}" for why, names in by_cause.items()], "; ")


def broken_members(state: State, generation: GenerationRecord) -> tuple[NodeId, ...]:
    """Return members that are lost, failed, or disconnected from a peer for ``broken_s``."""
    nodes, notable = state.nodes, state.nodes.notable
    suspects = (id_ for id_ in generation.members if id_ in notable or id_ not in nodes)
    return tuple(id_ for id_ in suspects if _broken_since(state, id_) is not None)


def _broken_since(state: State, id_: NodeId) -> float | None:
    node = state.nodes.get(id_)
    if node is None:
        return state.now
    if isinstance(node.standing, Lost):
        return node.standing.at
    if node.workers.failed_since is not None:
        return node.workers.failed_since
    broken_since = node.workers.broken_since
    if broken_since is not None and state.now >= broken_since + state.options.broken_s:
        return broken_since
    return None


def without_rank(failure: str) -> str:
    """Return a failure without the rank that reports it."""
    return _ON_RANK.sub("", failure)


def is_gone(node: Node | None) -> bool:
    """Return whether the machine itself is the cause: lost, broken, or short of memory."""
    if node is None or node.is_lost:
        return True
    return bool(node.why_unsound or node.exclusion.wrong_bits)


def _losses(state: State, active: Active) -> list[Trigger]:
    if active.generation is None:
        return []
    broken = broken_members(state, active.generation)
    lost = tuple(id_ for id_ in broken if is_gone(state.nodes.get(id_)))
    found: dict[str, Trigger] = {}
    # A lost node explains the failures of the others: name only the lost ones.
    for id_ in lost or broken:
        since = _broken_since(state, id_)
        assert since is not None
        due, text = since + state.options.failures_gather_s, _what_broke(state, id_)
        # What a script raises on all ranks alike is named once.
        said = _OF_SAMPLE.sub("", text.partition(" failed: ")[2])
        # So is a node to which several others lost the connection.
        same = without_rank(said) or text.partition(_CUT_OFF)[2] or text
        if same not in found or due < found[same].due:
            found[same] = Trigger(text, due, is_forced=True)
    return list(found.values())


def _what_broke(state: State, id_: NodeId) -> str:
    node = state.nodes.get(id_)
    if node is None:
        return node_cause(id_, "is lost")
    if node.is_lost:
        return node_cause(node.record.name, "is lost", node.why_lost)
    failure = "" if node.report is None else node.report.failure
    if failure:
        return node_cause(node.record.name, "failed", failure)
    # Its workers did not fail: the cause may be this node, a peer or the network.
    peers = () if node.report is None else node.report.broken_peers
    known = sorted(state.nodes[id_].record.name for id_ in peers if id_ in state.nodes)
    return f"{node.record.name}{_CUT_OFF}{first_few(known, ', ') if known else 'a peer'}"


def _notices(state: State, active: Active) -> list[Trigger]:
    if active.generation is None:
        return []
    found = []
    for id_ in sorted(state.nodes.notable.intersection(active.generation.members)):
        node = state.nodes[id_]
        since = leaves_from(active, node)
        if node.is_lost or since is None:
            continue
        due = since + state.options.notices_gather_s
        leaves_at = node.record.leaves_at
        if leaves_at is not None:
            due = min(due, max(state.now, leaves_at - state.options.notices_gather_s))
        cause: NodeCause = "is draining" if leaves_at is None else "is preempted"
        if node.exclusion.draining_since is None:
            cause = "goes to another job"
        # Until the job has to leave it, anything else may come first.
        is_forced = state.now >= since
        found.append(Trigger(node_cause(node.record.name, cause), due, is_forced=is_forced))
    return found


def _quarantines(state: State, active: Active) -> list[Trigger]:
    """Return triggers about members whose bits were contradicted after they had been chosen."""
    members = () if active.generation is None else active.generation.members
    marked = (state.nodes[id_] for id_ in sorted(state.nodes.notable.intersection(members)))
    names = [n.record.name for n in marked if n.exclusion.wrong_bits and not n.is_lost]
    causes = [node_cause(name, "is quarantined") for name in names]
    return [Trigger(cause, state.now, is_forced=True) for cause in causes]


def _slow_nodes(state: State, active: Active) -> list[Trigger]:
    found = []
    for id_, slow in to_leave_out(state, active).items():
        cause = node_cause(state.nodes[id_].record.name, "is slow", slow)
        found.append(Trigger(cause, state.now, is_forced=False, slow={id_: slow}))
    return found


def _additions(state: State, active: Active) -> list[Trigger]:
    if not isinstance(active.phase, Running) or active.generation is None:
        return []
    known = active.asked.nodes.union(active.generation.members)
    unknown = sorted(state.nodes.keys() - known)
    new = [id_ for id_ in unknown if state.nodes[id_].is_usable(is_member=False)]
    if not new:
        return []
    due = max(state.nodes[id_].since for id_ in new) + state.options.additions_gather_s
    # One whose drain or cordon was taken back has been there all along.
    names: dict[NodeCause, list[str]] = {}
    for id_ in new:
        is_back = state.nodes[id_].returned_at is not None
        cause: NodeCause = "could help again" if is_back else "could help"
        names.setdefault(cause, []).append(state.nodes[id_].record.name)
    reason = "; ".join(node_cause(first_few(each, ", "), cause) for cause, each in names.items())
    return [Trigger(reason, due, is_forced=False)]


def next_order(active: Active) -> Order | None:
    """Return the next order to carry out; a cancel comes before all others.

    Our own rollback follows: a pause would make wrong steps durable. A checkpoint is made at the
    same time and delays nothing.
    """
    orders = [order for order in active.orders if order.kind != "checkpoint"]
    first = [o for o in orders if o.kind == "cancel"] or [o for o in orders if o.wrong_bits]
    return next(iter(first or orders), None)


def last_steering_order(active: Active) -> OrderKind | None:
    """Return the open order that decides whether the job goes on."""
    steering = [order.kind for order in active.orders if order.kind in STEERING]
    return "cancel" if "cancel" in steering else next(reversed(steering), None)


def last_rollback(active: Active) -> Order | None:
    """Return the rollback that was ordered last."""
    return next((order for order in reversed(active.orders) if order.kind == "rollback"), None)


def pending_rollback(state: State, id_: JobId) -> Durable | None:
    """Return the checkpoint to which an order that was not carried out takes a job back."""
    active = state.active
    if active is not None and active.job == id_:
        order = last_rollback(active)
    else:
        order = state.rollbacks.get(id_)
    return None if order is None else order.durable


def ordered_plan(now: float) -> Trigger:
    """Return the trigger of a new plan that an operator ordered."""
    return Trigger("a new plan was ordered", now, is_forced=True, is_ordered=True)


def _orders(active: Active, now: float) -> list[Trigger]:
    order = next_order(active)
    if order is not None and order.kind == "replan":
        return [ordered_plan(now)]
    if ordered := _rollback(active):
        return [Trigger(ordered, now, is_forced=True)]
    if active.generation is not None and active.generation.state == "stopping":
        return [Trigger("the generation was told to stop", now, is_forced=True)]
    return []


def _rollback(active: Active) -> str:
    """Return the next order in words if it is a rollback, else an empty text."""
    order = next_order(active)
    if order is None or order.kind != "rollback":
        return ""
    assert order.durable is not None, "a rollback names its checkpoint"
    step = order.durable.point.step
    return (
        f"going back to step {step}"
        if order.wrong_bits
        else f"a rollback to step {step} was ordered"
    )


def _standstill(state: State, active: Active) -> list[Trigger]:
    options = state.options
    match active.phase:
        case Starting() if state.now >= active.phase.deadline:
            return [Trigger("the generation did not start in time", state.now, is_forced=True)]
        case Running() if state.now >= active.progress.advanced_at + stall_s(options, active):
            reason = f"no step was done for {stall_s(options, active):.0f} s"
            return [Trigger(reason, state.now, is_forced=True)]
        case Running():
            due = active.asked.at + options.reconsider_s
            return [Trigger(RECONSIDERED, due, is_forced=False)]
        case _:
            return []
