"""How the controller's state is shown: plain values for JSON, the same for every client."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from agents.protocol import JobId
from agents.wire import plain
from sailord.gateway import Transition
from sailord.model import Active, Node, Planning, Running, Starting, State, Stopping
from sailord.pace import Pace


def node_view(node: Node) -> dict[str, Any]:
    """One node."""
    record, report = node.record, node.report
    return {
        "id": record.id,
        "name": record.name,
        "state": _node_state(node),
        "zone": record.zone,
        "machine": record.machine,
        "gpu": record.gpu,
        "gpus": record.gpus,
        "spot": record.spot,
        "address": record.address,
        "cordoned": node.is_cordoned,
        "leaves_at": record.leaves_at,
        "taking": None if report is None else report.taking,
        "generation": None if report is None else report.generation,
        "step": None if report is None else report.step,
        "failure": "" if report is None else report.failure,
        "why_lost": node.why_lost,
    }


def _node_state(node: Node) -> str:
    if node.is_lost:
        return "lost"
    if node.absent_since is not None:
        return "suspect"
    if node.leaving_since is not None:
        return "draining"
    return "cordoned" if node.is_cordoned else node.record.state


def nodes_view(state: State) -> list[dict[str, Any]]:
    """All nodes, by name."""
    views = [node_view(node) for node in state.nodes.values()]
    return sorted(views, key=lambda view: (view["name"], view["id"]))


def jobs_view(state: State) -> list[dict[str, Any]]:
    """All jobs: the active one first, then the queue."""
    active = [] if state.active is None else [state.active.job]
    rest = sorted(state.jobs.values(), key=lambda j: (-j.priority, j.submitted_at, j.id))
    return [plain(job) for job in (*active, *rest)]


def job_view(state: State, id_: JobId) -> dict[str, Any] | None:
    """One job, with its generation."""
    active = state.active
    if active is not None and active.job.id == id_:
        return {
            **plain(active.job),
            "generation": plain(active.generation),
            "phase": phase_view(active),
            "step": active.step,
            "durable": plain(state.durables.get(id_)),
        }
    job = state.jobs.get(id_)
    if job is None:
        return None
    generation = state.generations.get(id_)
    return {
        **plain(job),
        "generation": plain(generation),
        "phase": None,
        "step": None if generation is None else generation.restore.point.step,
        "durable": plain(state.durables.get(id_)),
    }


def phase_view(active: Active) -> dict[str, Any]:
    """What the job is at, and until when that may take."""
    phase = active.phase
    deadline = phase.deadline if isinstance(phase, Planning | Starting | Stopping) else None
    reason = getattr(phase, "reason", None)
    return {
        "name": type(phase).__name__.lower(),
        "since": getattr(phase, "since", None),
        "deadline": deadline,
        "reason": active.job.reason if reason is None else reason,
    }


def active_view(
    state: State, pace: Pace, plan: dict[str, Any] | None, about: dict[str, Any], now: float
) -> dict[str, Any] | None:
    """The job that has the cluster: where it stands, and against what was predicted."""
    active = state.active
    if active is None:
        return None
    durable = state.durables.get(active.job.id)
    durable_step = 0 if durable is None else durable.point.step
    estimate = about.get("estimate") or {}
    iteration_s = pace.iteration_s if isinstance(active.phase, Running | Planning) else None
    tokens = about.get("tokens_per_iteration")
    predicted_s = estimate.get("iteration_s")
    members = () if active.generation is None else active.generation.members
    return {
        "id": active.job.id,
        "state": active.job.state,
        "priority": active.job.priority,
        "steps": active.job.steps,
        "step": active.step,
        "step_age_s": max(now - active.advanced_at, 0.0),
        "phase": phase_view(active),
        "generation": plain(active.generation),
        "members": [state.nodes[id_].record.name for id_ in members if id_ in state.nodes],
        "plan": plan,
        "predicted": {
            "iteration_s": predicted_s,
            "tokens_per_s": _rate(tokens, predicted_s),
            "usd_per_hour": estimate.get("cost_usd_per_hour"),
        },
        "measured": {"iteration_s": iteration_s, "tokens_per_s": _rate(tokens, iteration_s)},
        "durable_step": None if durable is None else durable_step,
        "steps_at_risk": active.step - durable_step,
        "failures": active.failures,
    }


def _rate(tokens: Any, seconds: Any) -> float | None:
    return tokens / seconds if tokens and seconds else None


def counts_view(state: State) -> dict[str, int]:
    """How many nodes are in which state."""
    return dict(sorted(Counter(_node_state(node) for node in state.nodes.values()).items()))


def why_view(
    job: dict[str, Any], about: dict[str, Any], history: tuple[Transition, ...]
) -> dict[str, Any]:
    """Why the job is where it is: the last transitions, and the planner's own reasons."""
    return {
        "job": job["id"],
        "state": job["state"],
        "reason": job["reason"],
        "phase": job["phase"],
        "generation_reason": (job["generation"] or {}).get("reason"),
        "plan": about.get("why", []),
        "move": about.get("move"),
        "last": [plain(line) for line in history[-5:]],
    }


def read_plan(text: bytes | None) -> dict[str, Any] | None:
    """A stored plan as plain values."""
    value = None if text is None else json.loads(text)
    assert value is None or isinstance(value, dict)
    return value
