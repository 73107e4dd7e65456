"""The panels of a plan's picture: schedule, memory and cost.

Colours are those of Okabe and Ito, which colour-blind people can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sailord.plots.timeline import Bar, BarKind, Lane, Row
from simulator.estimate.result import DeviceMemory, Money
from simulator.hardware.types import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIND_COLOURS: dict[BarKind, str] = {
    "forward": "#0072B2",
    "backward": "#E69F00",
    "weights": "#F0E442",
    "sync": "#009E73",
    "optimizer": "#CC79A7",
}
KIND_NAMES: dict[BarKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "weights": "gradient of weights",
    "sync": "gradient sync",
    "optimizer": "optimizer step",
}
PART_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#CC79A7",
    "activations": "#E69F00",
    "workspace": "#F0E442",
    "communication": "#009E73",
    "context": "#7F7F7F",
    "fragmentation": "#CCCCCC",
}
TOO_MUCH = "#B00000"
GREY = "#555555"
SLICE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#D55E00")
SLICES_MAX = len(SLICE_COLOURS)
DENSE = 60
"""With more passes in a row, only the start and the end of an iteration are drawn."""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A row of the picture: a stage group, and its vertical position."""

    top: float
    lane: Lane
    row: Row


def lines_of(lanes: Sequence[Lane], *, heading: float) -> tuple[list[PanelRow], list[float]]:
    """Return the rows from top to bottom, and the positions of the pipelines' headings."""
    lines: list[PanelRow] = []
    headings = []
    top = 0.0
    for lane in lanes:
        headings.append(top)
        top += heading
        for row in lane.rows:
            lines.append(PanelRow(top, lane, row))
            top += 1.0
    return lines, headings


# -- time -----------------------------------------------------------------------------------------


def windows_of(lanes: Sequence[Lane], iteration_s: float) -> list[tuple[float, float]]:
    """Return the windows of time to draw: the iteration, or its start and its end if dense."""
    rows = [[bar for bar in row.work if bar.kind != "optimizer"] for r in lanes for row in r.rows]
    if max(map(len, rows)) <= DENSE:
        return [(0.0, iteration_s)]
    ramps = (next(bar.end_s for bar in bars if bar.kind == "backward") for bars in rows)
    pairs = (2 * sum(bar.end_s - bar.start_s for bar in bars) / len(bars) for bars in rows)
    shown_s = max(1.25 * max(ramps), 6 * max(pairs))
    tail_s = iteration_s - max(bars[-1].end_s for bars in rows) + shown_s
    if shown_s + tail_s > 0.8 * iteration_s:
        return [(0.0, iteration_s)]
    return [(0.0, shown_s), (iteration_s - tail_s, iteration_s)]


def draw_schedule(axes: Axes, lines: Sequence[PanelRow], window: tuple[float, float]) -> None:
    """Draw what each stage group does in a window of time; white is idle."""
    start, end = window
    axes.set_xlim(start, end)
    dots_per_inch = axes.figure.dpi
    row_in = axes.bbox.height / dots_per_inch / axes.get_ylim()[0]
    inch_per_s = axes.bbox.width / dots_per_inch / (end - start)
    for line in lines:
        # A sync fills the row; overlapped passes leave its lower edge visible.
        _bars(axes, line.row.sync, window, top=line.top + 0.08, height=0.84)
        _bars(axes, line.row.work, window, top=line.top + 0.08, height=0.62)
        if row_in < 0.2:
            continue
        for bar in line.row.work:
            text = "" if bar.micro_batch is None else str(bar.micro_batch)
            inside = start <= bar.start_s and bar.end_s <= end
            if inside and (bar.end_s - bar.start_s) * inch_per_s > 0.05 + 0.06 * len(text):
                axes.text(
                    (bar.start_s + bar.end_s) / 2,
                    line.top + 0.39,
                    text,
                    fontsize=6,
                    ha="center",
                    va="center_baseline",
                    color="white" if bar.kind == "forward" else "black",
                )


def _bars(
    axes: Axes, bars: Sequence[Bar], window: tuple[float, float], *, top: float, height: float
) -> None:
    start, end = window
    seen = [bar for bar in bars if bar.end_s > start and bar.start_s < end]
    shortest_s = min(
        (bar.end_s - bar.start_s for bar in seen if bar.micro_batch is not None), default=0
    )
    for kind, colour in KIND_COLOURS.items():
        spans = [
            (max(bar.start_s, start), min(bar.end_s, end) - max(bar.start_s, start))
            for bar in seen
            if bar.kind == kind
        ]
        # White seams separate wide passes; an edge keeps a short optimizer step visible.
        seam = kind in ("forward", "backward", "weights") and shortest_s > 0.012 * (end - start)
        axes.broken_barh(
            spans,
            (top, height),
            facecolors=colour,
            edgecolors="white" if seam else colour,
            linewidth=0.4 if seam else 0.8 if kind == "optimizer" else 0.0,
            snap=False,  # Snapping would hide passes thinner than a dot.
        )


# -- memory ---------------------------------------------------------------------------------------


def draw_memory(
    axes: Axes, lines: Sequence[PanelRow], memory: Sequence[Sequence[DeviceMemory]]
) -> None:
    """Draw the memory of each group's devices; a black line is the capacity."""
    shown = [(line, memory[line.lane.pipelines[0]][line.row.stage]) for line in lines]
    # The bar of a split stage is its fullest share, across the rows of all shares.
    firsts = [(line, device) for line, device in shown if line.row.share == 0]
    shares = {
        id(line): sum(o.lane is line.lane and o.row.stage == line.row.stage for o in lines)
        for line, _ in firsts
    }
    longest = max(max(device.total, device.capacity) for _, device in firsts) / GIB
    axes.set_xlim(0, longest * 1.45)
    for line, device in firsts:
        top, height = line.top + 0.14, shares[id(line)] - 0.28
        left = 0.0
        for part, colour in PART_COLOURS.items():
            size = getattr(device, part) / GIB
            axes.broken_barh([(left, size)], (top, height), facecolors=colour, linewidth=0)
            left += size
        capacity = device.capacity / GIB
        axes.plot([capacity] * 2, [top - 0.1, top + height + 0.1], color="black", linewidth=1.6)
        text = f"{left:.1f} of {capacity:.1f}"
        if not device.fits:
            over = left - capacity
            axes.broken_barh(
                [(capacity, over)], (top, height), facecolors="none", edgecolors=TOO_MUCH,
                hatch="////", linewidth=1.4,
            )  # fmt: skip
            text = f"{over:.1f} GiB too much"
        axes.text(
            max(left, capacity) + 0.02 * longest,
            top + height / 2,
            text,
            fontsize=7,
            va="center",
            color=GREY if device.fits else TOO_MUCH,
            fontweight="normal" if device.fits else "bold",
        )


# -- money ----------------------------------------------------------------------------------------


def slices_of(money: Money) -> list[tuple[str, float]]:
    """Return the parts of the cost, largest first; small ones as one."""
    parts = [(f"{pool} compute", usd) for pool, usd in money.by_pool_usd]
    parts += [(f"{direction} egress", usd) for direction, usd in money.by_egress_usd]
    parts = sorted((part for part in parts if part[1] > 0), key=lambda part: (-part[1], part[0]))
    if len(parts) > SLICES_MAX:
        rest = parts[SLICES_MAX - 1 :]
        parts = [*parts[: SLICES_MAX - 1], (f"{len(rest)} others", sum(usd for _, usd in rest))]
    return parts


def money_sentence(money: Money) -> str | None:
    """Return the text in place of a pie, if there is none."""
    if money.unpriced:
        return "Unknown: there is no price for " + ", ".join(money.unpriced) + "."
    if not slices_of(money):
        return "Nothing: all prices here are zero."
    return None


def draw_money(axes: Axes, money: Money) -> None:
    """Draw the cost of an iteration as a pie with a legend; egress is hatched."""
    parts = slices_of(money)
    whole = sum(usd for _, usd in parts)
    pie = axes.pie(
        [usd for _, usd in parts],
        colors=SLICE_COLOURS[: len(parts)],
        startangle=90,
        counterclock=False,
        wedgeprops={"edgecolor": "white", "linewidth": 1.0},
    )
    wedges = pie[0]
    for wedge, (name, _) in zip(wedges, parts, strict=True):
        if name.endswith("egress"):
            wedge.set_hatch("////")
    axes.legend(
        wedges,
        [f"${usd:.3g}  ({usd / whole:.0%})  {name}" for name, usd in parts],
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        fontsize=8,
        frameon=False,
    )
