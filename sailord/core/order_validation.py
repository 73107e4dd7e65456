"""Rejects orders that would have no effect, and says what would."""

from __future__ import annotations

from agents.protocol.records import JobId, JobRecord, JobState, Order, OrderKind
from sailord.core.learn import learn
from sailord.core.model.events import OrderGiven
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Closing, Held, Waiting
from sailord.core.model.state import Active, State
from sailord.core.queries.job_cost import bill_now, why_not_afforded
from sailord.core.queries.replan_triggers import last_steering_order, why_waiting
from sailord.text.cures import spend_more
from sailord.text.units import dollars
from simulator.documents.problems import Problem

INSTEAD: dict[JobState, str] = {
    "queued": "it runs when its turn comes; it can be paused or cancelled",
    "paused": "it can be resumed, rolled back or cancelled",
    "failed": "it can be resumed",
    "done": "submit it again, under another id",
    "cancelled": "submit it again, under another id",
}
"""What can be ordered of a job that does not have the cluster."""


def why_without_effect(state: State, order: Order) -> Problem | None:
    """Return why the order would have no effect, and what would; ``None``: it has one.

    A repeated id is accepted: the sender did not receive our answer.
    """
    active = state.active
    if state.term is None or order.id in state.known_orders:
        return None
    if order.kind in {"drain", "preempt", "withdraw", "cordon", "uncordon"}:
        return _check_node(state, order)
    if order.kind == "budget":
        return _check_budget(state, order)
    if order.kind == "priority":
        return _check_priority(state, order)
    if active is not None and active.job == order.target:
        return _check_active(state, active, order.kind, why_not_afforded(state, active.job))
    job = state.jobs.get(JobId(order.target))
    if job is None:
        return None
    return _check_job(state, job, order, why_not_afforded(state, job.id))


# ---- jobs ---------------------------------------------------------------------------------------


def _check_job(state: State, job: JobRecord, order: Order, unpaid: str) -> Problem | None:
    """An order about a job without the cluster takes effect at once or never."""
    if unpaid and order.kind == "resume" and job.state in {"paused", "failed"}:
        return _report_no_effect(job.id, order.kind, unpaid, spend_more(job.id))
    after = learn(state, OrderGiven(state.now, order)).state
    if (after.jobs, after.rollbacks) != (state.jobs, state.rollbacks):
        return None
    return _report_no_effect(job.id, order.kind, f"it is {job.state}", INSTEAD[job.state])


def _check_budget(state: State, order: Order) -> Problem | None:
    job = state.jobs.get(JobId(order.target))
    if job is None or order.usd_max is None:
        return None
    if job.state in {"done", "cancelled"}:
        return _report_no_effect(job.id, order.kind, f"it is {job.state}", INSTEAD[job.state])
    bill = bill_now(state, job)
    if order.usd_max <= bill.usd:
        asked, cost = dollars(order.usd_max), dollars(bill.usd)
        if asked == cost:
            asked, cost = f"${order.usd_max:,.6f}", f"${bill.usd:,.6f}"
        what = f"{asked} is not more than the {cost} that it has cost"
        return Problem(job.id, what, "give more, or pause or cancel it")
    if order.usd_max == bill.usd_max:
        return _report_no_effect(job.id, order.kind, "it has that budget", "give another one")
    return None


def _check_priority(state: State, order: Order) -> Problem | None:
    job = state.jobs.get(JobId(order.target))
    if job is None:
        return None
    if job.state in {"done", "cancelled"}:
        return _report_no_effect(job.id, order.kind, f"it is {job.state}", INSTEAD[job.state])
    if order.priority == job.priority:
        return _report_no_effect(
            job.id, order.kind, "it has that priority", "sailorctl jobs lists all"
        )
    return None


def _check_active(state: State, active: Active, kind: OrderKind, unpaid: str) -> Problem | None:
    job, phase = state.job, active.phase
    record, heading = active.generation, last_steering_order(active)
    if heading == "cancel" or _ends(active):
        return _report_no_effect(job.id, kind, "it is about to end", "see sailorctl status")
    is_held = isinstance(active.phase, Held)
    match kind:
        case "pause" if heading == "pause":
            return _report_no_effect(
                job.id, kind, "it is being paused", "it can be resumed or cancelled"
            )
        case "resume" if not is_held and heading != "pause" and not _will_be_held(active):
            return _report_no_effect(
                job.id, kind, "it has the cluster", "it can be paused or cancelled"
            )
        case "resume" | "rollback" if unpaid:
            return _report_no_effect(job.id, kind, unpaid, spend_more(job.id))
        case "replan" if is_held:
            return _report_no_effect(job.id, kind, "it is on hold", "resume it: that plans anew")
        case "replan" if heading == "pause":
            return _report_no_effect(
                job.id, kind, "it is being paused", "resume it: that plans anew"
            )
        case "rollback" if heading == "pause":
            return _report_no_effect(
                job.id, kind, "it is being paused", "order it once it is paused"
            )
        case "checkpoint" if job.saving.uri is None:
            cure = "submit jobs with a uri under [checkpoint], and scripts with --checkpoint"
            return _report_no_effect(job.id, kind, "it names no place for checkpoints", cure)
        case "checkpoint" if record is None or record.state == "closed":
            return _report_no_effect(job.id, kind, "it does not run", "see sailorctl why")
        case "checkpoint" if isinstance(phase, Waiting) and active.asked.is_refused:
            why = f"it waits for a plan: {why_waiting(state, active, phase)}"
            return _report_no_effect(
                job.id, kind, why, "order it once the job runs; see sailorctl why"
            )
        case _:
            return None


def _ends(active: Active) -> bool:
    return isinstance(active.phase, Closing) and active.phase.then in {"done", "cancelled"}


def _will_be_held(active: Active) -> bool:
    return isinstance(active.phase, Closing) and active.phase.then == "held"


def _report_no_effect(id_: str, kind: OrderKind, why: str, cure: str) -> Problem:
    return Problem(id_, f"{kind} would change nothing: {why}", cure)


# ---- nodes --------------------------------------------------------------------------------------


def _check_node(state: State, order: Order) -> Problem | None:
    lives = [
        node for node in state.nodes.values() if order.target in (node.record.id, node.record.name)
    ]
    if order.kind == "withdraw":
        # Such a node would be marked again by its own record.
        own = [node for node in lives if node.record.state == "draining" and not node.is_lost]
        if own:
            why = "its own agent drains it: its service was stopped, or the cloud takes it away"
            cure = "start sailor-agent there again; a notice of the cloud ends by itself"
            return _report_no_effect(own[0].record.name, order.kind, why, cure)
    after = learn(state, OrderGiven(state.now, order)).state.nodes
    if not lives or any(after.get(node.record.id) != node for node in lives):
        return None
    node = max(lives, key=lambda node: (not node.is_lost, node.since))
    why, cure = _why_nothing(node, order.kind)
    return _report_no_effect(node.record.name, order.kind, why, cure)


def _why_nothing(node: Node, kind: OrderKind) -> tuple[str, str]:
    if node.is_lost:
        return f"it is lost ({node.why_lost})", "when its agent is back, it joins as a new node"
    match kind:
        case "drain" | "preempt":
            return "it is drained or draining already", "sailorctl withdraw reverts that"
        case "withdraw":
            return "it is not draining", "it can be drained or cordoned"
        case "cordon":
            return "it is cordoned already", "sailorctl uncordon reverts that"
        case _:
            return "it is not cordoned", "it can be cordoned or drained"
