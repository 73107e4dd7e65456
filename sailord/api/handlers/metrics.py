"""The metrics of this sailord, for Prometheus.

Base units; `_total` for what only grows.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

from prometheus_client.core import Metric

from agents.daemon.exposition import build_info, exposition, metric, optional
from agents.protocol.records import JobState
from sailord.api.answers import render
from sailord.api.answers.goodput import goodput_view
from sailord.api.answers.goodput_types import GoodputView
from sailord.api.answers.types import ActiveView, PhaseName
from sailord.api.handlers.capacity import CapacityView, capacity_of
from sailord.api.handlers.context import ApiContext
from sailord.capacity.core.model import CapacityState
from sailord.core.model.state import State
from sailord.core.model.stragglers import NodeSpeeds
from sailord.core.queries.straggler_queries import straggler_texts
from sailord.core.rules.job_rules import why_yielded
from sailord.goodput.core.causes import TEXTS
from sailord.goodput.core.ledger import IN_STEP


def metrics_text(api: ApiContext, about: Mapping[str, Any]) -> str:
    """All metrics in Prometheus' text format; ``about``: the planner's account of the plan."""
    families = [build_info("sailor_build_info"), *controller_metrics(api)]
    # A former leader's view of the jobs is out of date.
    if api.cluster.state.term is not None or api.cluster.leader is None:
        families += job_metrics(api, about)
        # A new leader has to read the ledger first: no counter may start from 0 until then.
        if api.goodput.stored.since_us is not None:
            books = api.goodput
            families += goodput_metrics(goodput_view(books.stored, books.stored_shares, most=2))
    if api.capacity is not None:
        families += capacity_metrics(capacity_of(api))
        families += refusal_metrics(api.capacity.state)
    return exposition(families, (*api.cluster.durations.histograms, api.request_times))


def controller_metrics(api: ApiContext) -> list[Metric]:
    """Metrics of the leader, the store, the active job and the nodes."""
    # Once another leads, it reports the nodes: a former leader shows its own state, without any.
    is_former = api.cluster.state.term is None and api.cluster.leader is not None
    cluster, state = api.cluster, api.cluster.state if is_former else api.cluster.last_led
    active, durations = state.active, cluster.durations
    unreadable = api.own_gateway.unreadable
    generation = active.generation if active is not None else None
    watch = NodeSpeeds() if active is None else active.slowness.speeds
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [
        metric("sailor_leads", "1 on the leader.", float(api.cluster.state.term is not None)),
        metric("sailor_store_up", "1 while the store is available.",
                float(cluster.store.is_available)),
        metric("sailor_writes_rejected_total", "Writes that the store rejected for good.",
                cluster.store.rejected_writes, "counter"),
        metric("sailor_generation", "Generation of the active job.",
                0 if generation is None else generation.number),
        metric("sailor_nodes", "Nodes by state.",
                [({"state": name}, count) for name, count in render.counts_view(state).items()]),
        metric("sailor_compute_over_predicted",
                "Measured over predicted compute time of a step, by GPU kind.",
                [({"gpu": gpu}, factor) for gpu, factor in sorted(watch.factors.items())]),
        metric("sailor_nodes_slow", "Stragglers.", len(straggler_texts(state))),
        metric("sailor_nodes_contradicted", "Nodes left out because their bits were contradicted.",
                sum(bool(node.exclusion.wrong_bits) for node in state.nodes.values())),
        metric("sailor_records_unreadable", "Records and messages that cannot be read now.",
                len(unreadable.found)),
        metric("sailor_records_unreadable_total", "Those found since the start.",
                unreadable.total, "counter"),
        metric("sailor_requests_refused_total", "Unauthenticated requests refused, by cause.",
                [({"why": why}, count) for why, count in api.strangers.by_cause().items()],
                "counter"),
        metric("sailor_decisions_total", "Decisions made.", durations.decisions, "counter"),
        metric("sailor_elections_total", "How often this sailord was elected.",
                durations.elections, "counter"),
        metric("sailor_steps_lost_total", "Steps that reconfigurations lost.",
                durations.steps_lost, "counter"),
        metric("sailor_plans_total", "Requests to the planner.",
                cluster.plan_requests, "counter"),
        metric("sailor_plans_foreseen", "Losses of nodes whose next plan is precomputed.",
                cluster.planner.precomputed_losses),
        metric("sailor_webhook_messages_waiting", "Messages that wait for the store.",
                cluster.outbox.waiting),
        metric("sailor_webhook_receivers_failing", "Receivers that do not accept messages.",
                len(cluster.outbox.failing)),
        metric("sailor_memory_peak_bytes", "Peak resident memory.", peak_kib * 1024),
    ]  # fmt: skip


def job_metrics(api: ApiContext, about: Mapping[str, Any]) -> list[Metric]:
    """Metrics of the jobs; those of the active one are left out while there is none."""
    state, outbox = api.cluster.last_led, api.cluster.outbox
    view = render.active_view(
        state, api.cluster.step_rate_of(None), None, about, outbox.at_of, state.now,
        api.cluster.safe_point(),
    )  # fmt: skip
    jobs, phase = counts_of_jobs(state), "" if view is None else view.phase.name
    return [
        metric("sailor_jobs", "Jobs by state; held counts those that gave the cluster away, too.",
               [({"state": each}, jobs[each]) for each in get_args(JobState)]),
        metric("sailor_job_phase", "1 for the phase of the active job.",
               [({"phase": each}, float(each == phase)) for each in get_args(PhaseName)]),
        *([] if view is None else of_active(view, not_durable_s(state, view))),
    ]  # fmt: skip


def counts_of_jobs(state: State) -> Counter[JobState]:
    """Count jobs by state: one that was held and gave the cluster to the next still waits."""
    return Counter(
        "held" if job.state == "paused" and why_yielded(job.reason) else job.state
        for job in state.jobs.values()
    )


def not_durable_s(state: State, view: ActiveView) -> float | None:
    """Return the seconds since a step of the active job became durable, before a first one since
    its start; unknown if it has no place for checkpoints."""
    since = state.job.past.since
    if view.durable_age_s is not None or view.checkpoint_uri is None or since is None:
        return view.durable_age_s
    return max(state.now - since, 0.0)


def of_active(view: ActiveView, durable_age_s: float | None) -> list[Metric]:
    """Metrics of the active job; unknown ones are left out."""
    safe = view.safe_step
    measured, predicted, spent = view.measured, view.predicted, view.spent
    return [
        metric("sailor_step", "Steps done by the active job.", view.step),
        metric("sailor_step_age_seconds", "Time since the last step.", view.step_age_s),
        metric("sailor_steps_at_risk", "Steps that the loss of all nodes would cost.",
               view.steps_at_risk),
        *optional("sailor_steps_at_risk_one_node", "Steps that the loss of one node would cost.",
                  None if safe is None else max(view.step - safe, 0)),
        metric("sailor_job_failures", "Failures in a row that no lost node explains.",
               view.failures),
        metric("sailor_job_cost_usd", "Cost of the active job so far.", spent.usd),
        *optional("sailor_steps_wanted", "Steps after which the job is done.", view.steps),
        *optional("sailor_durable_step", "The last durable step.", view.durable_step),
        *optional("sailor_durable_age_seconds",
                  "Time since a step became durable, or since the job began if none did.",
                  durable_age_s),
        *optional("sailor_step_seconds", "Measured duration of a step.", measured.iteration_s),
        *optional("sailor_step_predicted_seconds", "Predicted duration of a step.",
                  predicted.iteration_s),
        *optional("sailor_tokens_per_second", "Measured throughput, in tokens or samples.",
                  measured.tokens_per_s),
        *optional("sailor_loss", "Loss of the last step.", measured.loss),
        *optional("sailor_snapshot_stall_seconds", "How long a snapshot stalled a step.",
                  measured.stall_s),
        *optional("sailor_job_usd_per_hour", "Price of the active job's plan.",
                  spent.usd_per_hour),
        *optional("sailor_job_budget_usd", "The most that the job may cost.", spent.usd_max),
    ]  # fmt: skip


def goodput_metrics(view: GoodputView) -> list[Metric]:
    """The ledger. A step under way is a gauge: it is booked on its cause when it ends."""
    booked = {each.cause: each for each in view.causes}
    under_way = booked.pop(IN_STEP, None)
    causes = [cause for cause in TEXTS if cause != IN_STEP]
    # One of the last two may be the time without a job.
    last = [each for each in view.jobs if each.name][:1]
    return [
        metric("sailor_goodput_gpu_seconds_total", "Paid GPU time by cause.",
               [({"cause": each}, booked[each].gpu_s if each in booked else 0.0)
                for each in causes], "counter"),
        metric("sailor_goodput_usd_total", "Cost of paid GPU time by cause.",
               [({"cause": each}, booked[each].usd if each in booked else 0.0)
                for each in causes], "counter"),
        metric("sailor_goodput_step_under_way_gpu_seconds", "GPU time of the step under way.",
               0.0 if under_way is None else under_way.gpu_s),
        metric("sailor_goodput_job_gpu_seconds_total",
               "Paid GPU time by cause while the job has the cluster; of the last job.",
               [({"job": each.name, "cause": cause.cause}, cause.gpu_s)
                for each in last for cause in each.causes if cause.cause != IN_STEP], "counter"),
        metric("sailor_goodput_job_usd_total", "Its cost.",
               [({"job": each.name, "cause": cause.cause}, cause.usd)
                for each in last for cause in each.causes if cause.cause != IN_STEP], "counter"),
        metric("sailor_paid_gpus", "GPUs that are paid for now.", view.gpus),
        metric("sailor_paid_usd_per_hour", "What they cost an hour.", view.usd_per_hour),
    ]  # fmt: skip


def refusal_metrics(capacity: CapacityState) -> list[Metric]:
    """Metrics of what the provider refused, and of instances without an agent."""
    return [
        metric("sailor_pool_refusals", "Refused requests in a row, by pool and kind.",
               [({"zone": pool.zone, "machine": pool.machine, "spot": str(pool.spot).lower(),
                  "kind": each.kind}, each.refusals)
                for pool, each in sorted(capacity.cooldowns.items())]),
        metric("sailor_boots_failed", "Instances in a row that started no agent.",
               capacity.boots_failed),
    ]  # fmt: skip


def capacity_metrics(view: CapacityView) -> list[Metric]:
    """Metrics of rented instances and their cost."""
    pools = [
        ({"zone": p.zone, "machine": p.machine, "spot": str(p.spot).lower()}, p) for p in view.pools
    ]
    return [
        metric("sailor_machines", "Rented instances by pool and state.",
                [(labels | {"state": state}, getattr(pool, state))
                 for labels, pool in pools
                 for state in ("wanted", "up", "awaited", "asked")]),
        metric("sailor_machines_obtainable", "Instances that could be requested now, by pool.",
                [(labels, pool.obtainable) for labels, pool in pools]),
        metric("sailor_pool_resting", "1 while a pool is in cooldown after a refusal.",
                [(labels, float(pool.rest is not None)) for labels, pool in pools]),
        metric("sailor_pool_stopped", "1 while a pool is stopped after failed boots.",
                [(labels, float(bool(pool.stopped))) for labels, pool in pools]),
        metric("sailor_machine_usd_per_hour", "Price of one instance, by pool.",
                [(labels, pool.usd_per_hour) for labels, pool in pools
                 if pool.usd_per_hour is not None]),
        metric("sailor_machines_orphaned",
                "Instances that could not be deleted and are still billed.", len(view.orphans)),
        metric("sailor_capacity_usd_per_hour", "Present cost per hour of rented instances.",
                view.money.usd_per_hour),
        metric("sailor_capacity_usd", "Cost of rented instances so far.", view.money.spent_usd),
    ]  # fmt: skip
