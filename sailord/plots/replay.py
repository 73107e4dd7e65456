"""Draws a replay: available GPUs, those that each policy uses, and its throughput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.replay.run_replay import Replay
from sailord.plots.figure import write_figure
from sailord.plots.panels import GREY, SLICE_COLOURS, SLICES_MAX, TOO_MUCH
from simulator.traces.play_types import (
    PolicyResult,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POLICY_COLOURS = {
    "sailor": "#0072B2",
    "greedy": "#56B4E9",
    "ski-rental": "#009E73",
    "restart": "#E69F00",
    "ignore-additions": "#CC79A7",
    "uniform-progress": "#E69F00",
    "safety-net": "#009E73",
    "oracle": "#000000",
}
_WIDTH, _LEFT, _RIGHT = 12.0, 0.9, 9.3
"""Inches: the page's width, and the range of the time axis."""
_TOP, _GAP, _BOTTOM = 0.75, 0.3, 0.55
_GPUS, _POLICY, _SPEED = 1.6, 0.85, 2.1
"""Inches of height of the three kinds of panels."""


def draw_replay(result: Replay, shown: Sequence[PolicyResult], path: Path) -> None:
    """Draw a replay over time as SVG or PNG, by the file's suffix."""
    write_figure(path, lambda figure: _draw(figure, result, shown))


def _draw(figure: Figure, result: Replay, shown: Sequence[PolicyResult]) -> None:
    height = _TOP + _GPUS + len(shown) * (_POLICY + _GAP) + _GAP + _SPEED + _BOTTOM
    figure.set_size_inches(_WIDTH, height)
    unit_s, unit = _unit(result.trace.end_s)
    title = f"{result.trace.name}: training while GPUs come and go"
    figure.text(0.2 / _WIDTH, 1 - 0.35 / height, title, fontsize=13, fontweight="bold")
    top = height - _TOP

    def panel(size: float) -> Axes:
        nonlocal top
        box = (_LEFT / _WIDTH, (top - size) / height, (_RIGHT - _LEFT) / _WIDTH, size / height)
        top -= size + _GAP
        axes = figure.add_axes(box)
        axes.set_xlim(0, result.trace.end_s / unit_s)
        return axes

    first = panel(_GPUS)
    _draw_gpus(first, result, unit_s)
    for outcome in shown:
        axes = panel(_POLICY)
        _draw_used(axes, result, outcome, unit_s)
        axes.set_xticklabels([])
        note = _note(result, outcome)
        figure.text((_RIGHT + 0.15) / _WIDTH, (top + _GAP + _POLICY) / height, note, va="top")
    first.set_xticklabels([])
    _draw_speeds(panel(_SPEED), result, shown, unit_s).set_xlabel(unit)


def _unit(end_s: float) -> tuple[float, str]:
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if end_s >= 3 * size:
            return size, name
    return 1.0, "seconds"


def _draw_gpus(axes: Axes, result: Replay, unit_s: float) -> None:
    """Draw the available GPUs, stacked by pool."""
    edges = [span.start_s / unit_s for span in result.spans]
    edges.append(result.trace.end_s / unit_s)
    below = [0] * len(result.spans)
    for number, pool in enumerate(result.plans.pools):
        above = [base + span.up[number] for base, span in zip(below, result.spans, strict=True)]
        colour = SLICE_COLOURS[number % SLICES_MAX]
        axes.stairs(
            above, edges, baseline=below, fill=True, color=colour, alpha=0.75,
            label=f"{pool.gpu} in {pool.zone}" + (", spot" if pool.spot else ""),
        )  # fmt: skip
        below = above
    axes.set_ylim(0, max(*below, 1) * 1.05)
    axes.set_title("available GPUs")
    axes.locator_params(axis="y", integer=True, nbins=5)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=7.5)


def _draw_used(axes: Axes, result: Replay, outcome: PolicyResult, unit_s: float) -> None:
    """Draw the GPUs in use below those available; red where the job does not train."""
    edges = [span.start_s / unit_s for span in result.spans]
    edges.append(result.trace.end_s / unit_s)
    up = [sum(span.up) for span in result.spans]
    axes.stairs(up, edges, color=GREY, linewidth=0.7, baseline=None)
    top = max(*up, 1) * 1.05
    for segment in outcome.segments:
        span = (segment.start_s / unit_s, (segment.end_s - segment.start_s) / unit_s)
        if segment.kind == "training":
            assert segment.plan is not None
            used = sum(result.figures[segment.plan].gpus)
            axes.broken_barh(
                [span], (0, used), facecolors=POLICY_COLOURS[outcome.policy], alpha=0.6
            )
        else:
            # An edge keeps a downtime of seconds visible in a trace of days.
            is_move = segment.kind == "reconfiguring"
            axes.broken_barh(
                [span], (0, top), facecolors=TOO_MUCH, edgecolors=TOO_MUCH,
                linewidth=0.9 if is_move else 0.0, alpha=0.9 if is_move else 0.25,
            )  # fmt: skip
    axes.set_ylim(0, top)
    axes.locator_params(axis="y", integer=True, nbins=3)
    axes.set_title(f"{outcome.policy}: GPUs used; red: downtime, pale red: idle")


def _note(result: Replay, outcome: PolicyResult) -> str:
    share = result.share_of_ideal(outcome) or 0.0
    usd = "price unknown" if outcome.usd is None else f"${outcome.usd:,.2f}"
    down, lost, idle = (
        each / outcome.duration_s for each in (outcome.downtime_s, outcome.lost_s, outcome.idle_s)
    )
    return (
        f"{outcome.goodput_samples_per_s:.4g} samples/s, {share:.1%} of ideal\n"
        f"{usd}, {outcome.reconfigurations} moves, {outcome.steps_lost:,.0f} steps lost\n"
        f"{down:.1%} down, {lost:.1%} lost, {idle:.1%} idle"
    )


def _draw_speeds(axes: Axes, result: Replay, shown: Sequence[PolicyResult], unit_s: float) -> Axes:
    """Draw the throughput of each policy; the oracle's line is wide and pale below the others."""
    most = 0.0
    for outcome in shown:
        edges, rates = [0.0], []
        for segment in outcome.segments:
            edges.append(segment.end_s / unit_s)
            way = result.figures[segment.plan] if segment.plan is not None else None
            runs = way is not None and segment.kind == "training"
            rates.append(way.samples / way.iteration_s if runs and way is not None else 0.0)
        most = max(most, *rates, 0.0)
        axes.stairs(
            rates, edges, baseline=None, color=POLICY_COLOURS[outcome.policy], label=outcome.policy,
            linewidth=2.6 if outcome.policy == "oracle" else 1.3,
            alpha=0.35 if outcome.policy == "oracle" else 0.9,
        )  # fmt: skip
    axes.set_ylim(0, most * 1.08 or 1.0)
    axes.set_title("samples per second while it trains")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    return axes
