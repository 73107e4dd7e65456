"""Metrics of this sailord, for Prometheus."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sailord.api.answers import render
from sailord.api.handlers.capacity import CapacityView, capacity_of
from sailord.api.handlers.context import ApiContext
from sailord.core.model.stragglers import Speeds
from sailord.core.queries.straggler_queries import straggler_texts

Samples = Iterable[tuple[Mapping[str, str], float]]


def metrics_text(api: ApiContext) -> str:
    """All metrics in Prometheus' text format."""
    families = controller_metrics(api)
    if api.capacity is not None:
        families += capacity_metrics(capacity_of(api))
    return exposition(families)


def exposition(families: Iterable[Metric]) -> str:
    """Metrics in Prometheus' text format, without the library's own about the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry).decode()


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families

    def describe(self) -> Iterator[Metric]:
        return iter(())  # Otherwise the registry would collect once at registration.


def _metric(name: str, text: str, value: float | Samples, kind: str = "gauge") -> Metric:
    metric = Metric(name.removesuffix("_total") if kind == "counter" else name, text, kind)
    for labels, each in [({}, value)] if isinstance(value, int | float) else value:
        metric.add_sample(name, dict(labels), each)
    return metric


def controller_metrics(api: ApiContext) -> list[Metric]:
    """Metrics of the leader, the store, the active job and the nodes."""
    controller, state = api.controller, api.last_led
    active, times = state.active, controller.times
    unreadable = api.own_gateway.unreadable
    generation = active.generation if active is not None else None
    watch = Speeds() if active is None else active.slowness.speeds
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [
        _metric("sailor_leads", "1 on the leader.", float(api.state.term is not None)),
        _metric("sailor_store_up", "1 while the store is available.",
                float(controller.cluster.store.is_available)),
        _metric("sailor_writes_rejected_total", "Writes that the store will never take.",
                controller.cluster.store.rejected_writes, "counter"),
        _metric("sailor_step", "Step of the active job.",
                0 if active is None else active.progress.step),
        _metric("sailor_generation", "Generation of the active job.",
                0 if generation is None else generation.number),
        _metric("sailor_nodes", "Nodes by state.",
                [({"state": name}, count) for name, count in render.counts_view(state).items()]),
        _metric("sailor_compute_over_predicted",
                "Measured over predicted compute time of a step, by GPU kind.",
                [({"gpu": gpu}, factor) for gpu, factor in sorted(watch.factors.items())]),
        _metric("sailor_nodes_slow", "Stragglers.", len(straggler_texts(state))),
        _metric("sailor_records_unreadable", "Records and messages that cannot be read now.",
                len(unreadable.found)),
        _metric("sailor_records_unreadable_total", "Those found since the start.",
                unreadable.total, "counter"),
        _metric("sailor_jobs_queued", "Queued jobs.",
                sum(job.state == "queued" for job in state.jobs.values())),
        _metric("sailor_requests_refused_total", "Unauthenticated requests refused, by cause.",
                [({"why": why}, count) for why, count in sorted(api.strangers.refused.items())],
                "counter"),
        _metric("sailor_decisions_total", "Decisions made.", times.count, "counter"),
        _metric("sailor_plans_total", "Requests to the planner.",
                controller.effects.plan_requests, "counter"),
        _metric("sailor_plans_foreseen", "Losses of nodes whose next plan is precomputed.",
                controller.effects.planner.precomputed_losses),
        _metric("sailor_decision_seconds", "Duration of recent decisions.",
                _quantiles(times.decision_s), "summary"),
        _metric("sailor_event_to_decision_seconds", "Time from recent events to their decisions.",
                _quantiles(times.event_to_decision_s), "summary"),
        _metric("sailor_memory_peak_bytes", "Peak resident memory.", peak_kib * 1024),
    ]  # fmt: skip


def capacity_metrics(view: CapacityView) -> list[Metric]:
    """Metrics of rented machines and their cost."""
    pools = [
        ({"zone": p.zone, "machine": p.machine, "spot": str(p.spot).lower()}, p) for p in view.pools
    ]
    return [
        _metric("sailor_machines", "Rented machines by pool and state.",
                [(labels | {"state": state}, getattr(pool, state))
                 for labels, pool in pools
                 for state in ("wanted", "up", "awaited", "asked")]),
        _metric("sailor_machines_obtainable", "Machines that could be requested now, by pool.",
                [(labels, pool.obtainable) for labels, pool in pools]),
        _metric("sailor_pool_resting", "1 while a pool is in backoff after a refusal.",
                [(labels, float(pool.rest is not None)) for labels, pool in pools]),
        _metric("sailor_pool_stopped", "1 while a pool is stopped after failed boots.",
                [(labels, float(bool(pool.stopped))) for labels, pool in pools]),
        _metric("sailor_machine_usd_per_hour", "Price of one machine, by pool.",
                [(labels, pool.usd_per_hour) for labels, pool in pools
                 if pool.usd_per_hour is not None]),
        _metric("sailor_machines_orphaned",
                "Machines that could not be deleted and are still billed.", len(view.orphans)),
        _metric("sailor_capacity_usd_per_hour", "Present cost per hour of rented machines.",
                view.money.usd_per_hour),
        _metric("sailor_capacity_usd", "Cost of rented machines so far.", view.money.spent_usd),
    ]  # fmt: skip


def _quantiles(seconds: Iterable[float]) -> Samples:
    ordered = sorted(seconds)
    if not ordered:
        return []
    return [
        ({"quantile": str(q)}, ordered[min(int(q * len(ordered)), len(ordered) - 1)])
        for q in (0.5, 0.99)
    ]
