"""Draws an estimate: the pipelines over time, their memory, and the cost.

A row is a stage group: its schedule on the left, its memory on the right.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sailord.plots import panels
from sailord.plots.figure import write_figure
from sailord.plots.panels import PanelRow
from sailord.plots.timeline import Lane, bare_lanes, lanes_of
from simulator.api import Estimator
from simulator.documents.problems import InputError
from simulator.estimate.event_estimator import EventEstimator
from simulator.estimate.result import Estimate
from simulator.spec.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES_MAX = 8
ROWS_MAX = 64

# The page in inches; at 100 dots each it is 1200 wide and, for a dozen rows, 900 high.
_WIDTH = 12.0
_TOP, _AXIS, _BOTTOM = 1.4, 0.55, 2.25
_NAMES_END, _TIME_END, _MEMORY_START, _MEMORY_END = 2.5, 7.95, 8.75, 11.85
_GAP = 0.18


def write_plot(plan: Plan, estimate: Estimate, judge: Estimator, path: Path) -> None:
    """Draw a checked plan as SVG or PNG, by the file's suffix."""
    lanes, missing = _lanes(plan, judge)
    write_figure(path, lambda figure: _draw(figure, plan, estimate, lanes, missing))


def _lanes(plan: Plan, judge: Estimator) -> tuple[tuple[Lane, ...], str]:
    """Return the pipelines to draw, and why they have no schedule, if so."""
    if not isinstance(judge, EventEstimator):
        return bare_lanes(plan), (
            f"No schedule is drawn: the {judge.name} estimator is a formula without one."
        )
    try:
        return lanes_of(plan, judge), ""
    except InputError as error:
        return bare_lanes(plan), f"No schedule is drawn: {error.problems[0].what}."


def _draw(
    figure: Figure, plan: Plan, estimate: Estimate, lanes: Sequence[Lane], missing: str
) -> None:
    shown = _select_lanes(lanes)
    rows = sum(len(lane.rows) for lane in shown)
    row_in = 0.44 if rows <= 8 else 0.36 if rows <= 16 else 0.3 if rows <= 32 else 0.19
    heading = 0.3 / row_in
    lines, headings = panels.lines_of(shown, heading=heading)
    depth = lines[-1].top + 1.0
    height = _TOP + depth * row_in + _AXIS + _BOTTOM
    figure.set_size_inches(_WIDTH, height)
    page = _Page(figure, height, _BOTTOM + _AXIS, depth, depth * row_in)

    _title(page, estimate, more=len(lanes) - len(shown))
    page.name_rows(lines, headings, plan, two_lines=row_in >= 0.3)
    if missing:
        page.text(_NAMES_END, height - 1.1, textwrap.fill(missing, 130), style="italic")
        page.memory(_NAMES_END, lines, estimate)
    else:
        page.schedule(lines, shown, estimate)
        page.memory(_MEMORY_START, lines, estimate)
    page.legends(with_schedule=not missing, divides=plan.schedule == "zero-bubble")
    page.money(estimate)


def _select_lanes(lanes: Sequence[Lane]) -> list[Lane]:
    """Return the first pipelines that fit on a page, at least one."""
    shown = [lanes[0]]
    for lane in lanes[1:LANES_MAX]:
        if sum(len(other.rows) for other in (*shown, lane)) > ROWS_MAX:
            break
        shown.append(lane)
    return shown


def _title(page: _Page, estimate: Estimate, *, more: int) -> None:
    money = estimate.money.total_usd
    cost = "price unknown" if money is None else f"${money:.4g}"
    title = (
        f"One iteration: {estimate.iteration_s:.4g} s, {estimate.samples_per_iteration:,} samples, "
        f"{estimate.throughput_samples_per_s:.4g} samples/s, {cost}"
        f"{'' if estimate.fits else ', DOES NOT FIT'}"
    )
    page.text(0.2, page.height - 0.3, title, fontsize=13, fontweight="bold")
    said = f"Estimator {estimate.estimator}. Bottleneck: {estimate.bottleneck}."
    if more:
        said += f" {more} more different pipelines are not shown."
    page.text(0.2, page.height - 0.55, textwrap.fill(said, 190), va="top", color=panels.GREY)


class _Page:
    """Places axes and text in inches from the lower left corner."""

    def __init__(
        self, figure: Figure, height: float, rows_bottom: float, depth: float, rows_height: float
    ) -> None:
        self.figure, self.height, self.depth = figure, height, depth
        self.rows_bottom, self.rows_height = rows_bottom, rows_height

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        self.figure.text(x / _WIDTH, y / self.height, text, **style)

    def axes(self, left: float, bottom: float, right: float, top: float) -> Axes:
        box = (left, bottom, right - left, top - bottom)
        return self.figure.add_axes(
            (box[0] / _WIDTH, box[1] / self.height, box[2] / _WIDTH, box[3] / self.height)
        )

    def rows(self, left: float, right: float) -> Axes:
        """Add axes over all rows, counted from the top."""
        axes = self.axes(left, self.rows_bottom, right, self.rows_bottom + self.rows_height)
        axes.set_ylim(self.depth, 0)
        axes.set_yticks([])
        axes.ticklabel_format(axis="x", useOffset=False, style="plain")
        return axes

    def y(self, top: float) -> float:
        return self.rows_bottom + self.rows_height * (1 - top / self.depth)

    def name_rows(
        self, lines: Sequence[PanelRow], headings: Sequence[float], plan: Plan, *, two_lines: bool
    ) -> None:
        lanes = list(dict.fromkeys(line.lane for line in lines))
        for lane, top in zip(lanes, headings, strict=True):
            pipeline = plan.pipelines[lane.pipelines[0]]
            count, size = pipeline.micro_batches, plan.size_of(pipeline)
            text = f"{lane.title}: {count} micro batches of {size}"
            self.text(0.2, self.y(top) - 0.2, text, fontsize=7.5, fontweight="bold")
        for line in lines:
            row, y = line.row, self.y(line.top + 0.5)
            if two_lines:
                text = f"{row.name}: {row.layers}\n{row.devices}"
            else:
                text = f"{row.layers}, {row.devices}"
            self.text(0.3, y, text, fontsize=7 if two_lines else 6, va="center")

    def schedule(
        self, lines: Sequence[PanelRow], lanes: Sequence[Lane], estimate: Estimate
    ) -> None:
        windows = panels.windows_of(lanes, estimate.iteration_s)
        left = _NAMES_END
        room = _TIME_END - _NAMES_END - _GAP * (len(windows) - 1)
        whole = sum(end - start for start, end in windows)
        for number, (start, end) in enumerate(windows):
            share = (end - start) / whole
            if len(windows) > 1:
                share = min(max(share, 0.35), 0.65)
            axes = self.rows(left, left + room * share)
            left += room * share + _GAP
            panels.draw_schedule(axes, lines, (start, end))
            axes.set_xlabel("seconds")
            if len(windows) > 1:
                axes.set_title("the end" if number else "the start, ...", color=panels.GREY)
            if number:
                axes.spines["left"].set_linestyle((0, (2, 2)))
        for line in lines:
            p, s = line.lane.pipelines[0], line.row.stage
            idle = estimate.stages[p][s].idle_s / estimate.iteration_s
            self.text(
                _TIME_END + 0.06, self.y(line.top + 0.5), f"{idle:.0%} idle", fontsize=7,
                va="center", color=panels.GREY,
            )  # fmt: skip

    def memory(self, left: float, lines: Sequence[PanelRow], estimate: Estimate) -> None:
        axes = self.rows(left, _MEMORY_END)
        panels.draw_memory(axes, lines, estimate.memory)
        axes.set_xlabel("GiB on each device; the black line is all it has")

    def legends(self, *, with_schedule: bool, divides: bool) -> None:
        from matplotlib.patches import Patch  # noqa: PLC0415 - loaded once by the caller

        if with_schedule:
            kinds = [
                Patch(facecolor=colour, label=panels.KIND_NAMES[kind])
                for kind, colour in panels.KIND_COLOURS.items()
                if divides or kind != "weights"
            ]
            idle = Patch(facecolor="white", edgecolor="black", linewidth=0.5)
            idle.set_label("waiting, or a message")
            kinds.append(idle)
            self.figure.legend(
                handles=kinds, loc="lower left", ncols=5 + divides, frameon=False, fontsize=7.5,
                bbox_to_anchor=(_NAMES_END / _WIDTH, (self.height - _TOP + 0.2) / self.height),
            )  # fmt: skip
        parts = [
            Patch(facecolor=colour, label=part) for part, colour in panels.PART_COLOURS.items()
        ]
        self.figure.legend(
            handles=parts, loc="upper left", ncols=2, frameon=False, fontsize=7.5,
            bbox_to_anchor=(_MEMORY_START / _WIDTH, (_BOTTOM) / self.height),
        )  # fmt: skip

    def money(self, estimate: Estimate) -> None:
        self.text(0.2, _BOTTOM - 0.25, "Where the dollars go", fontsize=9, fontweight="bold")
        sentence = panels.money_sentence(estimate.money)
        if sentence is not None:
            self.text(0.2, _BOTTOM - 0.6, textwrap.fill(sentence, 110), va="top")
            return
        panels.draw_money(self.axes(0.2, 0.1, 2.0, 1.9), estimate.money)
