"""Draws a frontier: throughput over cost, per hour and per iteration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planner.cost_frontier import Frontier
from sailord.plots.figure import write_figure
from sailord.plots.panels import GREY, SLICE_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _TOP, _PANEL, _LINE = 12.0, 0.75, 4.6, 0.17
"""Inches: the page, its title, the panels, and a line of the list below them."""


def draw_frontier(found: Frontier, job: str, path: Path) -> None:
    """Draw a frontier as SVG or PNG, by the file's suffix."""
    write_figure(path, lambda figure: _draw(figure, found, job))


def _draw(figure: Figure, found: Frontier, job: str) -> None:
    below = 0.75 + _LINE * (len(found.points) + 1)
    height = _TOP + _PANEL + below
    figure.set_size_inches(_WIDTH, height)
    title = f"{job}: throughput against dollars"
    figure.text(0.2 / _WIDTH, 1 - 0.35 / height, title, fontsize=13, fontweight="bold")
    panels = (
        ("$ an hour", [point.usd_per_hour for point in found.points]),
        ("$ an iteration", [point.usd for point in found.points]),
    )
    for number, (label, dollars) in enumerate(panels):
        left = 0.7 + number * 5.9
        axes = figure.add_axes(
            (left / _WIDTH, below / height, 5.2 / _WIDTH, (_PANEL - 0.2) / height)
        )
        _panel(axes, found, dollars)
        axes.set_xlabel(label)
        if not number:
            axes.set_ylabel("samples a second")
    for number, point in enumerate(found.points, start=1):
        used = ", ".join(f"{count} x {name}" for name, count in point.plan.gpus_used().items())
        text = (
            f"{number}: {point.estimate.throughput_samples_per_s:.4g} samples/s,"
            f" ${point.usd:.4g} an iteration, ${point.usd_per_hour:,.2f} an hour: {used}"
        )
        y = below - 0.6 - _LINE * number
        figure.text(0.7 / _WIDTH, y / height, text, fontsize=7.5, color=GREY)


def _panel(axes: Axes, found: Frontier, dollars: list[float]) -> None:
    """Draw the frontier as steps: between two costs the cheaper plan is the best."""
    rates = [point.estimate.throughput_samples_per_s for point in found.points]
    order = sorted(range(len(dollars)), key=lambda number: dollars[number])
    axes.step(
        [dollars[n] for n in order],
        [rates[n] for n in order],
        where="post",
        color=SLICE_COLOURS[0],
        linewidth=1.2,
    )
    axes.plot(dollars, rates, "o", color=SLICE_COLOURS[0], markersize=5)
    for number, (usd, rate) in enumerate(zip(dollars, rates, strict=True), start=1):
        axes.annotate(
            str(number), (usd, rate), xytext=(-4, 5), textcoords="offset points", ha="right"
        )
    axes.set_ylim(0, max(rates) * 1.1)
    axes.set_xlim(left=0, right=max(dollars) * 1.06 or 1.0)
    axes.grid(alpha=0.25, linewidth=0.6)
