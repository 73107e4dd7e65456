"""What is measured, in the text form that Prometheus reads."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator

from sailord.api import render
from sailord.api.app import Api
from sailord.api.capacity import CapacityView, capacity_of
from sailord.core.state import State
from sailord.core.straggler_detection import Speeds
from sailord.core.straggler_queries import straggler_texts


def metrics_text(api: Api) -> str:
    """All figures of this sailord."""
    return "\n".join(_lines(api)) + "\n"


def _lines(api: Api) -> Iterator[str]:
    shell, state = api.shell, api.shell.shown
    active = state.active
    step = 0 if active is None else active.progress.step
    generation = active.generation if active is not None else None
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield from _metric("sailor_leads", "gauge", "1 where this sailord leads.",
                       [("", float(shell.state.term is not None))])  # fmt: skip
    yield from _metric("sailor_store_up", "gauge", "1 while the store answers.",
                       [("", float(shell.store.is_available))])  # fmt: skip
    yield from _metric("sailor_step", "gauge", "Steps done by the active job.", [("", step)])
    yield from _metric("sailor_generation", "gauge", "Generation of the active job.",
                       [("", 0 if generation is None else generation.number)])  # fmt: skip
    yield from _metric("sailor_nodes", "gauge", "Nodes by state.",
                       _by_state(state))  # fmt: skip
    watch = Speeds() if active is None else active.slowness.speeds
    factors = [(f'gpu="{gpu}"', times) for gpu, times in sorted(watch.factors.items())]
    yield from _metric("sailor_compute_over_predicted", "gauge",
                       "Seconds that a kind of GPU computes in a step, over what was predicted.",
                       factors)  # fmt: skip
    yield from _metric("sailor_nodes_slow", "gauge", "Nodes that compute slower than they should.",
                       [("", len(straggler_texts(state)))])  # fmt: skip
    yield from _metric("sailor_jobs_queued", "gauge", "Jobs that wait.",
                       [("", sum(j.state == "queued" for j in state.jobs.values()))])  # fmt: skip
    yield from _metric("sailor_decisions_total", "counter", "Events decided upon.",
                       [("", shell.decisions)])  # fmt: skip
    yield from _metric("sailor_plans_total", "counter", "Questions asked of the planner.",
                       [("", shell.replans)])  # fmt: skip
    yield from _metric("sailor_plans_foreseen", "gauge", "Losses whose next plan is known.",
                       [("", shell.planning.precomputed_losses)])  # fmt: skip
    yield from _metric("sailor_decision_seconds", "summary", "A decision, over the last ones.",
                       _quantiles(shell.decision_s))  # fmt: skip
    yield from _metric("sailor_event_to_decision_seconds", "summary",
                       "From an event to its decision, over the last ones.",
                       _quantiles(shell.waited_s))  # fmt: skip
    yield from _metric("sailor_memory_peak_bytes", "gauge", "Most memory that was ever held.",
                       [("", peak_kib * 1024)])  # fmt: skip
    if api.procurer is not None:
        yield from _capacity_lines(capacity_of(api))


def _capacity_lines(view: CapacityView) -> Iterator[str]:
    labels = [
        f'zone="{p.zone}",machine="{p.machine}",spot="{str(p.spot).lower()}"' for p in view.pools
    ]
    pools = list(zip(labels, view.pools, strict=True))
    yield from _metric("sailor_machines", "gauge", "Rented machines by pool and state.",
                       [(f'{label},state="{state}"', getattr(pool, state))
                        for label, pool in pools
                        for state in ("wanted", "up", "awaited", "asked")])  # fmt: skip
    yield from _metric("sailor_machines_obtainable", "gauge",
                       "How many more could be asked for now.",
                       [(label, pool.obtainable) for label, pool in pools])  # fmt: skip
    yield from _metric(
        "sailor_pool_resting",
        "gauge",
        "1 while a pool that refused is not asked.",
        [(label, float(pool.rest is not None)) for label, pool in pools],
    )
    yield from _metric("sailor_machine_usd_per_hour", "gauge", "The price of one machine.",
                       [(label, pool.usd_per_hour) for label, pool in pools
                        if pool.usd_per_hour is not None])  # fmt: skip
    yield from _metric("sailor_machines_orphaned", "gauge", "Machines that would not be deleted.",
                       [("", len(view.orphans))])  # fmt: skip
    yield from _metric("sailor_capacity_usd_per_hour", "gauge", "What runs up by the hour now.",
                       [("", view.money.usd_per_hour)])  # fmt: skip
    yield from _metric("sailor_capacity_usd", "gauge", "What rented machines have cost.",
                       [("", view.money.spent_usd)])  # fmt: skip


def _by_state(state: State) -> list[tuple[str, float]]:
    return [(f'state="{name}"', count) for name, count in render.counts_view(state).items()]


def _metric(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{{{labels}}} {value:.10g}" if labels else f"{name} {value:.10g}"


def _quantiles(seconds: Iterable[float]) -> list[tuple[str, float]]:
    ordered = sorted(seconds)
    if not ordered:
        return []
    return [
        (f'quantile="{q}"', ordered[min(int(q * len(ordered)), len(ordered) - 1)])
        for q in (0.5, 0.99)
    ]
