"""Converts the controller's state into the API's answer types."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Reversible
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from agents.protocol.records import ENDED, JobId, JobRecord, NodeId, Point, Report
from sailord.api.answers import node_orders, node_types, types
from sailord.api.answers.job_troubles import hang, storage_trouble, troubles
from sailord.api.answers.last_told import last_told
from sailord.api.answers.queue_place import place_text, waits_for
from sailord.api.answers.running_job import RunningJob
from sailord.cluster_records import Transition
from sailord.controller.step_rate import StepRate
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Opening, Running, Starting, Stopping, Waiting
from sailord.core.model.standing import Unreachable
from sailord.core.model.state import Active, State
from sailord.core.queries.drain_status import drained, stuck
from sailord.core.queries.forecast import ends_at, usd_needed
from sailord.core.queries.idle_nodes import idle_nodes
from sailord.core.queries.job_cost import billed, is_billed, priced, why_not_afforded
from sailord.core.queries.job_queue import in_queue
from sailord.core.queries.leave_times import left_later
from sailord.core.queries.replan_triggers import has_no_node, why_waiting, with_answer
from sailord.core.queries.restore_choice import resume_point, why_queue_stands
from sailord.core.queries.straggler_queries import (
    NOT_SLOW,
    SlowText,
    prediction_drifts,
    slow_job,
    straggler_texts,
)
from sailord.core.queries.what_next import NOTHING_NEXT, what_next
from sailord.notify.feed import FeedEvent
from sailord.notify.outbox import committed_id
from sailord.page.training_curve import CurvePoint
from sailord.text.causes import first_names
from sailord.text.units import YEAR_S

NO_OTHER_NODE = (
    "no other node can take over its part: add nodes, start its agent again, or "
    "cancel the drain (sailorctl withdraw {name})"
)


def node_view(
    node: Node,
    *,
    safe_to_stop: bool,
    slow: SlowText = NOT_SLOW,
    idle: str = "",
    loss: node_types.LossView | None = None,
    cordon: node_orders.GivenReason = node_orders.NOT_ORDERED,
    drain: node_orders.GivenReason = node_orders.NOT_ORDERED,
) -> node_types.NodeView:
    """One node."""
    record, report = node.record, node.report
    same = ("id", "name", "zone", "machine", "gpu", "gpus", "spot", "address")
    return node_types.NodeView(
        **{name: getattr(record, name) for name in same},
        state=_node_state(node),
        cordoned=bool(node.exclusion.is_cordoned or node.exclusion.wrong_bits),
        leaves_at=record.leaves_at,
        taking=None if report is None else report.taking,
        generation=None if report is None else report.generation,
        step=None if report is None else report.step,
        failure="" if report is None else report.failure,
        why_lost=node.why_lost,
        trouble=_why_unheard(node) if report is None else report.trouble,
        safe_to_stop=safe_to_stop,
        unsound=node.why_unusable,
        slow=slow[0],
        slow_since=slow[1],
        idle=idle,
        loss=loss,
        cordoned_why=cordon.why,
        cordoned_at=cordon.at,
        drained_why=drain.why,
        drained_at=drain.at,
        version=record.protocol.release,
    )


def _why_unheard(node: Node) -> str:
    """Return why a present node has no report."""
    if not isinstance(node.standing, Unreachable):
        return ""
    return f"no report yet, and its agent does not answer at {node.record.address}"


def _node_state(node: Node) -> node_types.SeenState:
    if node.is_lost:
        return "lost"
    if node.absent_since is not None:
        return "suspect"
    if node.is_draining:
        return "draining"
    if node.exclusion.slow:
        return "slow"
    is_cordoned = node.exclusion.is_cordoned or node.exclusion.wrong_bits
    return "cordoned" if is_cordoned else node.record.state


def nodes_view(
    state: State,
    unreadable: Mapping[str, str] = MappingProxyType({}),
    losses: Mapping[NodeId, node_types.LossView] = MappingProxyType({}),
    *,
    only: Container[NodeId] | None = None,
    parts: Iterable[State] = (),
    feed: Reversible[FeedEvent] = (),
) -> node_types.NodeList:
    """All nodes, or ``only`` these, by name; ``feed`` tells when one was cordoned.

    ``unreadable``: the ids of nodes with unreadable records, and why. ``parts``: those of jobs that
    share the cluster, each with its nodes.
    """
    views, at_of = [], node_orders.ordered_at(feed)
    for part in tuple(parts) or (state,):
        free = drained(part)
        slow, idle = straggler_texts(part), idle_nodes(part)
        views += [
            node_view(
                node,
                safe_to_stop=id_ in free,
                slow=slow.get(id_, NOT_SLOW),
                idle=idle.get(id_, ""),
                loss=losses.get(id_),
                cordon=node_orders.cordon_of(part, node, at_of),
                drain=node_orders.drain_of(part, node, at_of),
            )
            for id_, node in part.nodes.items()
            if only is None or id_ in only
        ]
    known = {view.id for view in views}
    views += [_unreadable_node(id_, why) for id_, why in unreadable.items() if id_ not in known]
    return node_types.NodeList(tuple(sorted(views, key=lambda view: (view.name, view.id))))


def scrape_targets_view(state: State) -> tuple[types.ScrapeTarget, ...]:
    """The agents that Prometheus should ask for metrics: those of all nodes that are not lost."""
    records = sorted((n.record for n in state.nodes.values() if not n.is_lost), key=lambda r: r.id)
    return tuple(types.ScrapeTarget((r.address,), {"node": r.name}) for r in records)


def _unreadable_node(id_: str, why: str) -> node_types.NodeView:
    """A node of which sailord can read only the key of its record."""
    return node_types.NodeView(
        id=id_,
        name=id_.partition(".")[0],
        state="unreadable",
        zone="",
        machine="",
        gpu="",
        gpus=0,
        spot=False,
        address="",
        cordoned=False,
        leaves_at=None,
        taking=None,
        generation=None,
        step=None,
        failure="",
        why_lost="",
        trouble="",
        safe_to_stop=False,
        unsound=why,
        slow="",
    )


def counts_view(state: State) -> dict[str, int]:
    """Number of nodes by state."""
    return dict(sorted(Counter(_node_state(node) for node in state.nodes.values()).items()))


def queue_view(state: State) -> dict[str, Any]:
    """The queue, why it does not advance, and the jobs that wait for an operator."""
    queue = tuple(job.id for job in in_queue(state))
    return {
        "queued": len(queue),
        "queue": queue,
        "blocked": why_queue_stands(state) if queue else "",
        "paused": paused_view(state),
    }


def paused_view(state: State) -> tuple[types.PausedJob, ...]:
    """The jobs that wait for an operator and do not have the cluster."""
    return tuple(
        types.PausedJob(
            *(job.id, job.state, job.reason, why_not_afforded(state, id_)),
            *(resume_point(state, id_).step, job.steps, job.past.held_at),
        )
        for id_, job in sorted(state.jobs.items())
        if job.state in ("paused", "held") and (state.active is None or state.active.job != id_)
    )


def unsound_view(state: State) -> dict[str, str]:
    """By name: the nodes that the job cannot run on, and why."""
    found = {
        node.record.name: node.why_unusable
        for id_ in state.nodes.notable
        if (node := state.nodes[id_]).why_unusable and not node.is_lost
    }
    return dict(sorted(found.items()))


def leaving_view(*parts: State) -> tuple[types.Leaving, ...]:
    """The draining nodes, by announced end; those without one last. ``parts`` as ``nodes_view``."""
    free, kept = {id_ for part in parts for id_ in drained(part)}, stuck_view(*parts)
    leaving = [
        types.Leaving(
            node.record.name,
            node.record.leaves_at,
            safe_to_stop=id_ in free,
            stuck=kept.get(node.record.name, ""),
            left_at=later.get(id_),
        )
        for part, later in zip(parts, map(_left_later, parts), strict=True)
        for id_, node in part.nodes.items()
        if node.is_draining and not node.is_lost
    ]
    return tuple(sorted(leaving, key=lambda n: (n.leaves_at is None, n.leaves_at or 0.0, n.name)))


def _left_later(part: State) -> Mapping[NodeId, float]:
    return {} if part.active is None else left_later(part, part.active)


def stuck_view(*parts: State) -> dict[str, str]:
    """By name: the nodes whose drain cannot end, why, and what ends it."""
    names = sorted(part.nodes[id_].record.name for part in parts for id_ in stuck(part))
    return {name: NO_OTHER_NODE.format(name=name) for name in names}


def jobs_view(state: State, parts: Iterable[State] = ()) -> types.Jobs:
    """All jobs: those that run first, then the queue. ``parts`` as for ``nodes_view``."""
    running = {
        part.active.job: part for part in tuple(parts) or (state,) if part.active is not None
    }
    ordered = sorted(
        state.jobs.values(), key=lambda j: (j.id not in running, -j.priority, j.submitted_at, j.id)
    )
    rows = [types.ListedJob(**fields_of(job)) for job in ordered]
    for place, row in enumerate(rows):
        if (part := running.get(row.id)) is not None and part.active is not None:
            phase, end = phase_view(part, part.active), ends_at(part)
            rows[place] = replace(
                row,
                phase=phase.name,
                reason=phase.reason,
                step=part.active.progress.step,
                ends_at=None if end is None or end > part.now + YEAR_S else end,
            )
        elif row.state not in ENDED:
            rows[place] = replace(row, step=resume_point(state, row.id).step)
    return types.Jobs(tuple(rows))


def running_view(parts: Iterable[State]) -> tuple[RunningJob, ...]:
    """The jobs that share the cluster, each with its nodes; none if one has it alone."""
    found = []
    for part in parts:
        if (active := part.active) is not None:
            names = sorted(node.record.name for node in part.nodes.values() if not node.is_lost)
            phase, number = phase_view(part, active), active.generation
            found.append(
                RunningJob(
                    active.job,
                    phase.name,
                    None if number is None else number.number,
                    active.progress.step,
                    part.job.steps,
                    tuple(names),
                    active.progress.step_s,
                )
            )
    return tuple(found) if len(found) > 1 else ()


def job_view(state: State, id_: JobId) -> types.JobView | None:
    """One job, with its generation."""
    active, durable = state.active, state.durables.get(id_)
    if active is not None and active.job == id_:
        return types.JobView(
            **fields_of(state.job),
            generation=active.generation,
            phase=phase_view(state, active),
            step=active.progress.step,
            durable=durable,
        )
    job = state.jobs.get(id_)
    if job is None:
        return None
    generation = state.generations.get(id_)
    step = None if generation is None or job.state in ENDED else resume_point(state, id_).step
    return types.JobView(**fields_of(job), generation=generation, step=step, durable=durable)


def fields_of(job: JobRecord) -> dict[str, Any]:
    """A record's fields, for a type that extends it."""
    return {field.name: getattr(job, field.name) for field in fields(job)}


def phase_view(state: State, active: Active) -> types.PhaseView:
    """The job's phase and its deadline."""
    phase, question = active.phase, active.question
    if question is not None and not isinstance(phase, Starting):
        why, trains = with_answer(active, question.reason), isinstance(phase, Running)
        return types.PhaseView("planning", None, question.deadline, why, trains=trains)
    deadline = phase.deadline if isinstance(phase, Starting | Stopping) else None
    if isinstance(phase, Stopping) and active.checkpointing.securing is not None:
        # The job is stopped, and its state is being made durable.
        deadline = max(phase.deadline, active.checkpointing.securing.until)
    reason: str | None = getattr(phase, "reason", None)
    if isinstance(phase, Opening | Starting | Running):  # The job's reason is of its start.
        coming = phase.record if isinstance(phase, Opening) else active.generation
        reason = None if coming is None else coming.reason
    if isinstance(phase, Waiting):
        reason = why_waiting(state, active, phase)
    name: Any = type(phase).__name__.lower()
    return types.PhaseView(
        name=name,
        since=getattr(phase, "trained_since", None) or getattr(phase, "since", None),
        deadline=deadline,
        reason=state.job.reason if reason is None else reason,
        has_no_node=isinstance(phase, Waiting) and has_no_node(state, active),
        has_no_plan=isinstance(phase, Waiting) and active.asked.is_refused,
    )


def active_view(
    state: State,
    step_rate: StepRate,
    plan: Mapping[str, Any] | None,
    about: Mapping[str, Any],
    reported_at: Mapping[str, float],
    now: float,
    safe: Point | None = None,
    feed: Reversible[FeedEvent] = (),
    earlier: CurvePoint | None = None,
) -> types.ActiveView | None:
    """The active job: progress, prediction and measurement.

    ``reported_at`` has the time of each reported fact, by message id; ``safe`` is the newest point
    that survives the loss of any one node; ``feed`` has the last events, the oldest first.
    """
    active = state.active
    if active is None:
        return None
    durable = state.durables.get(active.job)
    durable_step = 0 if durable is None else durable.point.step
    durable_at = None if durable is None else reported_at.get(committed_id(active.job, durable))
    members = () if active.generation is None else active.generation.members
    return types.ActiveView(
        id=active.job,
        state=state.job.state,
        priority=state.job.priority,
        begun_at=state.job.past.since,
        steps=state.job.steps,
        step=active.progress.step,
        step_age_s=max(now - active.progress.advanced_at, 0.0),
        phase=phase_view(state, active),
        generation=active.generation,
        members=tuple(state.nodes[id_].record.name for id_ in members if id_ in state.nodes),
        plan=plan,
        predicted=_predicted_view(about),
        unit=about.get("unit", "tokens"),
        measured=_measured_view(state, active, step_rate, about),
        durable_step=None if durable is None else durable_step,
        durable_age_s=None if durable_at is None else max(now - durable_at, 0.0),
        steps_at_risk=max(active.progress.step - durable_step, 0),
        storage_trouble=storage_trouble(active, now),
        troubles=(*hang(state, active, members, now), *troubles(state, members)),
        failures=active.attempts.failures,
        spent=_spent_view(state, active, now),
        drift=_drift(active, about),
        safe_step=None if safe is None else max(safe.step, durable_step),
        checkpoint_uri=state.job.saving.uri,
        last_move=last_told(feed, "reconfigured", active.job),
        last_order=last_told(feed, "order", active.job),
        next=what_next(state),
        earlier=earlier,
        unanswered=active.unanswered,
        slow=None if (slow := slow_job(state, active)) is None else types.Told(*slow),
    )


def _drift(active: Active, about: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a profile and the steps differ; a computed prediction is not expected to hold."""
    is_measured = (about.get("estimate") or {}).get("source") in ("measured", "interpolated")
    return prediction_drifts(active) if is_measured else ()


def _spent_view(state: State, active: Active, now: float) -> types.Spent:
    generation = priced(state, active.generation)
    bill = billed(state.job, generation, now)
    rate = 0.0 if generation is None or not is_billed(generation) else generation.usd_per_hour
    unpaid = why_not_afforded(state, active.job)
    needed = usd_needed(state)
    return types.Spent(bill.usd, bill.unpriced_s, rate, bill.usd_max, unpaid, needed)


def _predicted_view(about: Mapping[str, Any]) -> types.Predicted:
    estimate = about.get("estimate") or {}
    seconds = estimate.get("iteration_s")
    rate = _rate(about.get("tokens_per_iteration"), seconds)
    source = estimate.get("source")
    return types.Predicted(seconds, rate, estimate.get("cost_usd_per_hour"), source)


def _measured_view(
    state: State, active: Active, step_rate: StepRate, about: Mapping[str, Any]
) -> types.Measured:
    """Measurements reported by workers; the speed as the last steps had it, once some were done."""
    trains = isinstance(active.phase, Running | Stopping)
    seen_s = step_rate.iteration_s if trains else None
    reports = _reports(state, active)
    # What workers report is the speed of a single step, and no longer holds after a stop.
    said = next((r.tokens_per_s for r in reports if r.tokens_per_s is not None and trains), None)
    rate = _rate(about.get("tokens_per_iteration"), seen_s) or said
    loss = next((r.loss for r in reports if r.loss is not None), None)
    stalls = [r.stall_s for r in reports if r.stall_s is not None]
    return types.Measured(seen_s, rate, loss, max(stalls, default=None))


def _reports(state: State, active: Active) -> list[Report]:
    """The members' last reports on the present generation, the most advanced first."""
    generation = active.generation
    if generation is None:
        return []
    nodes = (state.nodes.get(id_) for id_ in generation.members)
    reports = [node.report for node in nodes if node is not None and node.report is not None]
    ours = [report for report in reports if report.speaks_of(generation)]
    return sorted(ours, key=lambda report: -report.step)


def _rate(tokens: Any, seconds: Any) -> float | None:
    return tokens / seconds if tokens and seconds else None


def why_view(
    state: State,
    job: types.JobView,
    about: Mapping[str, Any],
    history: tuple[Transition, ...],
    unavailable_since: float | None,
) -> types.Why:
    """Why the job is in its state: the last transitions and the planner's reasons."""
    active = state.active if state.active is not None and state.active.job == job.id else None
    return types.Why(
        job=job.id,
        state=job.state,
        reason=job.reason,
        phase=job.phase,
        generation_reason=None if job.generation is None else job.generation.reason,
        plan=tuple(about.get("why", ())),
        move=about.get("move"),
        last=history[-5:],
        waits_for=waits_for(state, job.id),
        place=place_text(state, job.id),
        blocked=why_queue_stands(state) if job.state == "queued" else "",
        store_away_since=unavailable_since,
        drift=() if active is None else _drift(active, about),
        stuck=()
        if active is None
        else tuple(f"{name}: {why}" for name, why in stuck_view(state).items()),
        idle=() if active is None else _list_idle(state),
        iteration_s=(about.get("estimate") or {}).get("iteration_s"),
        said="" if active is None else active.asked.said,
        spent=None if active is None else _spent_view(state, active, state.now),
        next=NOTHING_NEXT if active is None else what_next(state),
        at=state.now,
    )


def _list_idle(state: State) -> tuple[str, ...]:
    """Return each reason once, with the nodes that are idle for it."""
    by_reason: dict[str, list[str]] = {}
    for id_, why in idle_nodes(state).items():
        by_reason.setdefault(why, []).append(state.nodes[id_].record.name)
    return tuple(f"{first_names(sorted(names))}: {why}" for why, names in by_reason.items())


def read_plan(text: bytes | None) -> dict[str, Any] | None:
    """A stored plan as plain values."""
    value = None if text is None else json.loads(text)
    assert value is None or isinstance(value, dict)
    return value
