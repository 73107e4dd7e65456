"""Timing of each reconfiguration, phase by phase, beside the prediction.

From the controller's own phases and from what the nodes' reports measure:

- *detect*: from the first sign of the trigger to the question to the planner, the gathering
  window included; the first sign of a loss is the lost node's last sign of life
- *plan*: until the planner answers
- *no_plan*: after the answer that there is no plan for the nodes that are up, until it is asked
  again, if that was so
- *retries*: generations in between that were opened and never ran, if there were any
- *quiesce*: until the old generation is left and the next one is stored
- *fetch*, *rebuild*, *verify*, *first_step*: as the slowest node reports; unreported phases are
  left out
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agents.protocol.records import OrderKind
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Held, Opening, Running, Starting, Stopping, Waiting
from sailord.core.model.standing import Lost
from sailord.core.model.state import Active, OpenQuestion, State
from sailord.core.queries.active_job import is_rolling_back
from sailord.core.queries.generation_record import is_first
from sailord.core.queries.leave_times import leaves_from
from sailord.core.queries.replan_triggers import next_order
from sailord.text.causes import joined_reasons

START = "start"
"""A reconfiguration before which nothing ran: the first one, or one after a pause."""
_LEAVING: tuple[OrderKind, ...] = ("drain", "preempt", "quarantine")
"""Orders of a node that are carried out once its job is elsewhere."""
MEASURED = ("fetch", "rebuild", "verify", "first_step")


@dataclass(frozen=True, slots=True)
class ReconfigurationTiming:
    """One reconfiguration, from the first sign of its trigger to the end of the next first step."""

    generation: int
    at: float
    """When the first sign of the trigger was seen."""
    kind: str
    reason: str
    is_planned: bool
    """All members parked at the end of a step; else the generation was abandoned."""
    source: str
    restored_step: int
    steps_lost: int
    downtime_s: float
    """From the last step before to the end of the first after, less the time of a step; 0 for a
    start."""
    total_s: float
    predicted_s: float
    """Seconds that the planner predicted."""
    phases: tuple[tuple[str, float], ...]
    predicted: tuple[tuple[str, float], ...] = ()
    """The same phases, as predicted."""
    uncorrected: tuple[tuple[str, float], ...] = ()
    """The prediction, not corrected by earlier moves."""
    orders: tuple[str, ...] = ()
    """The ids of orders that this carried out."""
    usd: float | None = None
    """Cost of the downtime and of the lost steps' repetition, at the price of the next plan; null:
    of a start, or without a known price."""


@dataclass(frozen=True, slots=True)
class Reconfiguring:
    """A reconfiguration that is under way."""

    sign_at: float
    asked_at: float
    kind: str
    reason: str
    answered_at: float | None = None
    is_planned: bool = False
    stood_at: float | None = None
    """The last step before."""
    reached: int = 0
    """The highest step before."""
    refused_at: float | None = None
    """Since when there is no plan for the nodes that are up."""
    without_plan_s: float = 0.0
    """Earlier such times."""
    retried_s: float = 0.0
    """Spent on generations in between that never ran."""
    retried: tuple[str, ...] = ()
    """The reasons of these generations: what began the reconfiguration is the first."""
    orders: tuple[str, ...] = ()
    steps_lost: int = 0
    predicted_s: float = 0.0
    predicted: tuple[tuple[str, float], ...] = ()
    uncorrected: tuple[tuple[str, float], ...] = ()
    opened_at: float | None = None
    step_s: float = 0.0


def follow(
    under_way: Reconfiguring | None, before: State, after: State
) -> tuple[Reconfiguring | None, ReconfigurationTiming | None]:
    """Follow one decision; return what is under way, and a reconfiguration that ended."""
    active = after.active
    if after.term is None or active is None or isinstance(active.phase, Held):
        return None, None
    if before.active is not None and before.active.job != active.job:
        under_way = None  # That of the job before, which gave the cluster to this one at once.
    if active.question is not None:
        return _follow_question(under_way, before, after, active, active.question)
    was = None if before.active is None else before.active.phase
    match active.phase:
        case Stopping() | Opening() if under_way is not None and under_way.opened_at is not None:
            under_way = replace(_note_retry(under_way, after.now), answered_at=after.now)
            if isinstance(active.phase, Opening):
                under_way = _note_left(
                    under_way, after, active, is_planned=isinstance(was, Stopping)
                )
        case Stopping() if under_way is not None and under_way.answered_at is None:
            under_way = replace(under_way, answered_at=after.now)
        case Opening() if under_way is not None and not isinstance(was, Opening):
            under_way = _note_left(under_way, after, active, is_planned=isinstance(was, Stopping))
        case Starting() if under_way is not None and under_way.opened_at is None:
            under_way = replace(under_way, opened_at=after.now)
        case Running() if under_way is not None:
            return _follow_running(under_way, after, active)
        case Waiting() if active.asked.is_refused:
            if under_way is None:
                sign_at, kind = _find_sign(before, after, active, None)
                under_way = Reconfiguring(sign_at, after.now, kind, active.phase.reason)
            if under_way.refused_at is None:
                under_way = replace(under_way, refused_at=after.now)
        case _:
            pass
    return under_way, None


def _follow_question(
    under_way: Reconfiguring | None,
    before: State,
    after: State,
    active: Active,
    question: OpenQuestion,
) -> tuple[Reconfiguring | None, ReconfigurationTiming | None]:
    """Follow an open question."""
    if under_way is not None and under_way.refused_at is not None:
        waited_s = after.now - under_way.refused_at
        under_way = replace(
            under_way,
            asked_at=under_way.asked_at + waited_s,  # The planner had no part in it.
            refused_at=None,
            without_plan_s=under_way.without_plan_s + waited_s,
        )
    if under_way is None:
        sign_at, kind = _find_sign(before, after, active, question)
        under_way = Reconfiguring(sign_at, after.now, kind, question.reason)
    elif under_way.opened_at is not None and isinstance(active.phase, Starting | Running):
        # It is about what runs already: the reconfiguration ends with its first step.
        return _follow_running(under_way, after, active)
    elif under_way.opened_at is not None:
        under_way = _note_retry(under_way, after.now)
    if question.answer is None:
        return replace(under_way, answered_at=None), None
    if under_way.answered_at is None:
        under_way = replace(under_way, answered_at=after.now, reason=question.reason)
    return under_way, None


def _note_retry(seen: Reconfiguring, now: float) -> Reconfiguring:
    """Note that the generation that was opened never trained; another one follows."""
    retried_s = seen.retried_s + now - seen.asked_at
    again = replace(seen, asked_at=now, answered_at=None, opened_at=None, retried_s=retried_s)
    return replace(again, retried=(*seen.retried, seen.reason))


def _note_left(
    seen: Reconfiguring, state: State, active: Active, *, is_planned: bool
) -> Reconfiguring:
    """Note that the old generation is over, and the next one's record is being stored."""
    assert isinstance(active.phase, Opening)
    stood_at, reached = seen.stood_at, max(seen.reached, active.progress.step)
    if stood_at is None:
        is_start = is_first(active.phase.record)
        stood_at = seen.sign_at if is_start else active.progress.advanced_at
    answered_at = state.now if seen.answered_at is None else seen.answered_at
    return replace(
        seen,
        answered_at=answered_at,
        # Also after a loss: the rollback decides which steps are repeated.
        kind="order" if seen.kind != START and _is_ordered_back(active) else seen.kind,
        is_planned=is_planned and active.phase.record.restore.source == "memory",
        stood_at=stood_at,
        reached=reached,
        orders=tuple(dict.fromkeys([*seen.orders, *_list_carried_out(state, active)])),
        steps_lost=max(reached - active.phase.record.restore.point.step, 0),
        predicted_s=active.phase.proposal.move_s,
        predicted=active.phase.proposal.move_phases,
        uncorrected=active.phase.proposal.move_uncorrected,
        step_s=active.progress.step_s or active.phase.proposal.iteration_s,
        reason=active.phase.record.reason,
    )


def _is_ordered_back(active: Active) -> bool:
    """Return whether an operator ordered a rollback."""
    order = next_order(active)
    return is_rolling_back(active) and order is not None and not order.wrong_bits


def _list_carried_out(state: State, active: Active) -> tuple[str, ...]:
    """Return the ids of the orders that the next generation carries out: a rollback, and those
    about nodes that it leaves."""
    assert isinstance(active.phase, Opening)
    order = next_order(active) if is_rolling_back(active) else None
    rollback = () if order is None else (order.id,)
    before = () if active.generation is None else active.generation.members
    left = [id_ for id_ in before if id_ not in active.phase.record.members]
    about = (order for id_ in left for order in state.marks.get(id_, ()))
    return (*rollback, *(order.id for order in about if order.kind in _LEAVING))


def _follow_running(
    seen: Reconfiguring, state: State, active: Active
) -> tuple[Reconfiguring | None, ReconfigurationTiming | None]:
    record = active.generation
    if record is None or seen.opened_at is None:
        return None, None  # It was abandoned: the old generation continues.
    if active.progress.step <= record.restore.point.step:
        return seen, None
    assert seen.answered_at is not None, "a generation opens after an answer"
    assert seen.stood_at is not None, "a generation opens after the one before was left"
    is_start = seen.kind == START
    downtime_s = 0.0 if is_start else active.progress.advanced_at - seen.stood_at - seen.step_s
    downtime_s = max(downtime_s, 0.0)
    paid_s, rate = downtime_s + seen.steps_lost * seen.step_s, record.usd_per_hour
    phases = {
        "detect": seen.asked_at - seen.sign_at - seen.retried_s - seen.without_plan_s,
        **({"retries": seen.retried_s} if seen.retried_s > 0 else {}),
        "plan": seen.answered_at - seen.asked_at,
        **({"no_plan": seen.without_plan_s} if seen.without_plan_s > 0 else {}),
        "quiesce": seen.opened_at - seen.answered_at,
        **_measure_phases(state, active),
    }
    return None, ReconfigurationTiming(
        generation=record.number,
        at=seen.sign_at,
        kind=seen.kind,
        reason=joined_reasons([*seen.retried, seen.reason]),
        is_planned=seen.is_planned,
        source=record.restore.source,
        restored_step=record.restore.point.step,
        orders=seen.orders,
        steps_lost=seen.steps_lost,
        downtime_s=downtime_s,
        total_s=active.progress.advanced_at - seen.sign_at,
        predicted_s=seen.predicted_s,
        phases=tuple((name, max(seconds, 0.0)) for name, seconds in phases.items()),
        predicted=seen.predicted,
        uncorrected=seen.uncorrected,
        usd=None if is_start or rate is None else paid_s / 3600 * rate,
    )


def _measure_phases(state: State, active: Active) -> dict[str, float]:
    """Return the slowest node's times, since all wait for it."""
    assert active.generation is not None
    found: dict[str, float] = {}
    for _, report in state.reports_of(active.generation):
        for name, seconds in report.phases:
            found[name] = max(found.get(name, 0.0), seconds)
    return {name: found[name] for name in MEASURED if name in found}


def _find_sign(
    before: State, state: State, active: Active, question: OpenQuestion | None
) -> tuple[float, str]:
    """Return when the trigger was first seen, and its kind; a job that waits needs no question."""
    phase, generation = active.phase, active.generation
    assert isinstance(phase, Waiting | Starting | Running), "no question is open in other phases"
    if isinstance(phase, Waiting) and (generation is None or generation.state == "closed"):
        return phase.since, START
    members = () if generation is None else generation.members
    nodes = [node for id_ in members if (node := state.nodes.get(id_)) is not None]
    kinds: dict[str, list[float | None]] = {
        "loss": [_last_life(active, n, n.standing) for n in nodes if isinstance(n.standing, Lost)],
        "failure": [n.workers.failed_since or n.workers.broken_since for n in nodes],
        "notice": [since for n in nodes if (since := _left_since(state, active, n)) is not None],
    }
    for kind, moments in kinds.items():
        seen = [moment for moment in moments if moment is not None]
        if seen:
            broken = [n.workers.broken_since for n in nodes if n.workers.broken_since is not None]
            return min([*seen, *(broken if kind == "loss" else ())]), kind
    if isinstance(phase, Waiting):
        return phase.since, "failure"
    assert question is not None, "a job that starts or runs is moved by a question"
    if question.slow:
        return state.now, "slow"
    if question.is_forced:
        return state.now, "order"
    # A node that was asked about before is no news: it was too early for it.
    old = {*members, *(() if before.active is None else before.active.asked.nodes)}
    new = [state.nodes[id_].free_since for id_ in question.nodes if id_ not in old]
    # A node that came during the last reconfiguration counts from its end.
    return (max(*new, phase.since), "addition") if new else (state.now, "reconsidered")


def _last_life(active: Active, node: Node, lost: Lost) -> float:
    """Return when a lost node was last known to be alive: by its report, or by a step."""
    return min(lost.absent_since or lost.at, max(node.heard_at, active.progress.advanced_at))


def _left_since(state: State, active: Active, node: Node) -> float | None:
    """Return since when a member that drains has to be left; ``None``: it does not yet."""
    since = leaves_from(active, node)
    return since if since is not None and since <= state.now else None
