"""The reply to an agent's report: what to release, what to make durable, when to report next."""

from __future__ import annotations

from agents.protocol.records import Point, Report, ReportReply
from sailord.core.model.state import State

REPORTS_PER_S_MAX = 500.0
"""Maximum routine reports per second, cluster-wide; news is reported at once besides."""
REPORTS_EVERY_S_MIN = 0.2


def report_every_s(state: State) -> float:
    """Return the interval of routine reports."""
    return max(REPORTS_EVERY_S_MIN, len(state.nodes) / REPORTS_PER_S_MAX)


def answer_to(state: State, report: Report, release: Point | None) -> ReportReply:
    """Return what the agent may release, what it must make durable, and when to report next."""
    active = state.active
    every_s = report_every_s(state)
    if active is None or report.job != active.job:
        return ReportReply(state.term, every_s=every_s)
    upload = None if active.checkpointing.securing is None else active.checkpointing.securing.point
    return ReportReply(state.term, release, upload, every_s)
