"""Whether any node can be prepared for the job: its work folder, its setup, its memory."""

from __future__ import annotations

from agents.protocol.records import PREPARING
from sailord.core.model.nodes import Node
from sailord.core.model.state import Active, State
from sailord.core.queries.replan_triggers import usable, why_unsound


def why_unprepared(state: State, active: Active, since: float) -> str:
    """Return why no node can run a job that has waited since then; empty while one may.

    Each node has time for a second attempt, since a package registry may be down; while one makes
    an attempt, the answer is empty.
    """
    if usable(state, active):
        return ""
    living = [node for _, node in sorted(state.nodes.items()) if not node.is_lost]
    failed = [node for node in living if _has_failed(node)]
    if not failed or any(_may_be_usable(node) for node in living):
        return ""
    tried = (node.since if node.unfit_since is None else node.unfit_since for node in failed)
    if state.now < max(since, *tried) + state.options.unprepared_s:
        return ""
    return f"no node can be prepared for it: {why_unsound(failed)}"


def _has_failed(node: Node) -> bool:
    return node.report is not None and node.report.unfit not in ("", PREPARING)


def _may_be_usable(node: Node) -> bool:
    """Return whether it may become usable without an operator."""
    if node.is_draining or node.is_closed_to_new_plans:
        return False
    if node.exclusion.slow or node.exclusion.wrong_bits:
        return False
    return not _has_failed(node) and not (node.report is not None and node.report.fault)
