"""Text of an estimate, and of a comparison of predictions with measured runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

from sailord.text.table import table
from sailord.text.units import counted, number_ranges
from simulator.estimate.result import Estimate
from simulator.hardware.types import GIB
from simulator.spec.job import Job
from simulator.spec.plan import Plan, Stage
from simulator.validate_runs import Comparison, ValidationReport, source_summary

ROWS_MAX = 40
RANGES_MAX = 4
"""Ranges of pipeline numbers shown in a row."""


def estimate_text(plan: Plan, job: Job, estimate: Estimate) -> str:
    """Return an estimate: its totals, one row per kind of stage, and the sources of its numbers."""
    lines = [*_totals(plan, job, estimate), ""]
    lines += [_stages(plan, estimate), ""]
    lines.append(f"bottleneck  {estimate.bottleneck}")
    error = estimate.provenance.relative_error
    lines.append(f"source      {estimate.provenance.source}, within about {error:.0%}")
    notes = dict.fromkeys((*estimate.notes, *estimate.provenance.notes))
    lines += [f"note        {note}" for note in notes]
    return "\n".join(lines)


def _totals(plan: Plan, job: Job, estimate: Estimate) -> Iterable[str]:
    money = estimate.money
    samples, of, tokens = estimate.throughput_samples_per_s, "", ""
    if job.sequence > 1:
        of, tokens = f", sequence {job.sequence}", f", {samples * job.sequence:,.0f} tokens/s"
    yield f"job         {job.name}: {job.model.name}, {job.precision}{of}"
    shape = (
        f"{counted(len(plan.pipelines), 'pipeline')}{_describe_placement(plan)}{_schedule(plan)}"
    )
    shape += "" if plan.zero is None else ", with ZeRO-1" if plan.zero else ", without ZeRO-1"
    shape += ", tokens shared by the ranks of a stage" if plan.sequence_parallel else ""
    if plan.outer_every is not None:
        groups = counted(len(plan.outer_groups), "group")
        shape += f", in {groups} with an outer step every {plan.outer_every} iterations"
    yield (
        f"plan        {shape}, micro batch {'/'.join(map(str, plan.sizes))}, "
        f"{estimate.samples_per_iteration} samples an iteration"
    )
    yield f"devices     {gpus_text(plan)}"
    yield f"iteration   {_seconds(estimate.iteration_s)} ({estimate.estimator} estimator)"
    yield f"throughput  {samples:.4g} samples/s{tokens}"
    if money.total_usd is None:
        yield f"cost        unknown: no price for {', '.join(money.unpriced)}"
    else:
        hourly = money.total_usd / estimate.iteration_s * 3600
        yield (
            f"cost        ${money.total_usd:.4g} an iteration (${money.egress_usd:.3g} of it "
            f"egress), ${hourly:,.2f} an hour"
        )
    if estimate.fits:
        yield "memory      fits"
    elif estimate.host_shortage:
        yield f"memory      DOES NOT FIT: {estimate.host_shortage}"
    else:
        full = sum(not device.fits for row in estimate.memory for device in row)
        yield f"memory      DOES NOT FIT on {counted(full, 'device group')}"


def _describe_placement(plan: Plan) -> str:
    """Say how pipelines are placed, if not stage by stage over all of them."""
    if plan.together is None:
        return ""
    return f" placed {plan.together} at a time" if plan.together > 1 else " placed one by one"


def _schedule(plan: Plan) -> str:
    """Name a schedule with divided backwards, or how many chunks a device group holds."""
    if plan.schedule == "zero-bubble":
        return ", zero-bubble"
    return f", {plan.virtual_stages} chunks each" if plan.virtual_stages > 1 else ""


def gpus_text(plan: Plan) -> str:
    """Return the GPUs of a plan: 8 x A100-40@us-west1-a, ..."""
    return ", ".join(f"{count} x {name}" for name, count in plan.gpus_used().items())


def _stages(plan: Plan, estimate: Estimate) -> str:
    """Return one row per kind of stage group."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, chunks in enumerate(plan.chunks(pipeline)):
            stage, device = chunks[0], estimate.memory[p][s]
            row = [
                str(s),
                ", ".join(map(_layers, chunks)),
                _devices(stage),
                stage.places[0].zone,
                str(pipeline.micro_batches)
                + (f" of {plan.size_of(pipeline)}" if len(plan.sizes) > 1 else ""),
                f"{device.total / GIB:.1f}/{device.capacity / GIB:.1f}"
                + ("" if device.fits else " !"),
            ]
            if estimate.stages:
                time = estimate.stages[p][s]
                row += [
                    f"{part / estimate.iteration_s:.0%}"
                    for part in (time.compute_s, time.communication_s, time.idle_s)
                ]
            rows.setdefault(tuple(row), []).append(p)
    header = ["pipelines", "stage", "layers", "devices", "zone", "micro batches", "GiB"]
    if estimate.stages:
        header += ["compute", "comm.", "idle"]
    listed = [[number_ranges(pipelines, RANGES_MAX), *row] for row, pipelines in rows.items()]
    text = table(header, listed[:ROWS_MAX])
    rest = len(listed) - ROWS_MAX
    return text + (f"\n... and {rest} more (--json has them all)" if rest > 0 else "")


def _layers(stage: Stage) -> str:
    """Return the layers of a stage, how many of the first ones are recomputed, and how many of the
    next ones are offloaded: 0-7 (3 again, 2 offloaded)
    """
    first, end = stage.layers
    some = "all" if stage.recompute == "full" else str(stage.recomputed)
    said = [f"{some} again"] if stage.recomputed else []
    said += [f"{stage.offloaded} offloaded"] if stage.offloaded else []
    return f"{first}-{end - 1}" + (f" ({', '.join(said)})" if said else "")


def _devices(stage: Stage) -> str:
    """Return the devices of a stage: A100-40 x2; of a split stage, the groups of each kind."""
    kinds = Counter(place.gpu for place in stage.places)
    return " + ".join(
        f"{gpu} x{stage.tp}" + (f" ({groups} groups)" if groups > 1 else "")
        for gpu, groups in kinds.items()
    )


def validation_text(report: ValidationReport, estimator_name: str) -> str:
    """Return measured and predicted values per case, then the figures of each source."""
    cases = [
        [
            c.case,
            _number(c.time_measured_s, "{:.3f}"),
            f"{c.time_predicted_s:.3f}",
            _number(c.time_error_pct, "{:+.1f}"),
            _number(c.memory_measured_bytes, "{:.2f}", GIB),
            f"{c.memory_predicted_bytes / GIB:.2f}",
            _number(c.memory_error_pct, "{:+.1f}"),
            c.provenance,
        ]
        for c in report.comparisons
    ]
    header = ["case", "s", "predicted", "%", "GiB", "predicted", "%", "source"]
    sources = [*report.by_source().items()]
    if len(sources) > 1:
        sources.append(("all", list(report.comparisons)))
    sums = [[name, *_figures(comparisons)] for name, comparisons in sources]
    sum_header = ["source", *(name for name, _, _ in FIGURES), "memory: mean %", "max %"]
    return f"estimator {estimator_name}\n\n{table(header, cases)}\n\n{table(sum_header, sums)}"


FIGURES = (
    ("runs", "n", "{}"),
    ("mean %", "mean_abs_pct", "{:.2f}"),
    ("median %", "median_abs_pct", "{:.2f}"),
    ("max %", "max_abs_pct", "{:.2f}"),
    ("bias %", "bias_pct", "{:+.2f}"),
    ("inside error bar", "inside_error_bars", "{:.0%}"),
    ("rank correlation", "rank_correlation", "{:.2f}"),
    ("pairs right", "pairs_right", "{:.0%}"),
    ("regret: mean", "regret_mean", "{:.3f}"),
    ("max", "regret_max", "{:.3f}"),
)
"""Columns of a source: heading, key of ``sailorctl validate --json``, form."""


def _figures(comparisons: list[Comparison]) -> list[str]:
    found = source_summary(comparisons)
    cells = [_number(found[key], form) for _, key, form in FIGURES]
    memories = [abs(c.memory_error_pct) for c in comparisons if c.memory_error_pct is not None]
    both = (statistics.fmean(memories), max(memories)) if memories else (None, None)
    return cells + [_number(value, "{:.2f}") for value in both]


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value if unit == 1.0 else value / unit)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.3f} s"
