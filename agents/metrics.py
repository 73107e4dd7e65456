"""Metrics of this agent, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import get_args

from prometheus_client.core import Metric

from agents.core.model import State
from agents.daemon.exposition import build_info, exposition, metric, optional
from agents.protocol.records import Report, Taking


def metrics_text(
    state: State,
    *,
    now: float,
    answered_s: float,
    refused: Mapping[str, int],
    unreadable: int,
) -> str:
    """Return all metrics; ``answered_s``: when a sailord last answered, on the monotonic clock."""
    return exposition([
        build_info("sailor_agent_build_info"),
        *_node_metrics(state, now),
        *_work_metrics(state),
        metric("sailor_agent_leader_age_seconds", "Time since a sailord last answered.",
               max(time.monotonic() - answered_s, 0.0)),
        metric("sailor_agent_requests_refused_total", "Unauthenticated requests refused, by cause.",
               [({"why": why}, count) for why, count in refused.items()], "counter"),
        metric("sailor_agent_records_unreadable", "Records that cannot be read now.", unreadable),
    ])  # fmt: skip


def _node_metrics(state: State, now: float) -> list[Metric]:
    node, silent = state.node, state.store_silent_since
    labels = {"node": node.name, "zone": node.zone, "machine": node.machine, "gpu": node.gpu}
    return [
        metric("sailor_agent_gpus", "GPUs of this node.", [(labels, node.gpus)]),
        metric("sailor_agent_registered", "1 while the node is registered in the store.",
               float(state.is_registered)),
        metric("sailor_agent_healthy", "1 while the last self-test of the devices holds.",
               float(state.is_healthy and not state.fault)),
        metric("sailor_agent_draining", "1 after a notice, or an order to stop.",
               float(state.is_leaving or bool(state.notices))),
        metric("sailor_agent_store_silent_seconds", "Time since the store stopped answering; 0: "
               "it answers.", 0.0 if silent is None else max(now - silent, 0.0)),
        metric("sailor_agent_snapshots", "Sealed snapshots in memory.", len(state.sealed)),
        metric("sailor_agent_snapshot_trouble", "1 while snapshots are not replicated or uploaded.",
               float(bool(state.trouble))),
        metric("sailor_agent_unfit", "1 while the job cannot run here.", float(bool(state.unfit))),
    ]  # fmt: skip


def _work_metrics(state: State) -> list[Metric]:
    report = state.last_report
    taking = "idle" if report is None else report.taking
    return [
        metric("sailor_agent_taking", "1 for what the node does in its generation.",
               [({"taking": each}, float(each == taking)) for each in get_args(Taking)]),
        metric("sailor_agent_generation", "The generation of its workers; 0: none.",
               0 if state.gang is None else state.gang.generation),
        metric("sailor_agent_step", "Steps done.", 0 if report is None else report.step),
        metric("sailor_agent_reports_total", "Reports made to the leader.", state.reports,
               "counter"),
        *([] if report is None else _measurement_metrics(report)),
    ]  # fmt: skip


def _measurement_metrics(report: Report) -> list[Metric]:
    return [
        metric("sailor_agent_phase_seconds", "Duration of the last start, by phase.",
               [({"phase": name}, seconds) for name, seconds in report.phases]),
        metric("sailor_agent_compute_seconds", "Recent compute time of a step, by rank.",
               [({"rank": str(rank)}, seconds) for rank, seconds in report.busy]),
        *optional("sailor_agent_snapshot_stall_seconds", "How long the last snapshots paused "
                  "training, on average.", report.stall_s),
    ]  # fmt: skip
