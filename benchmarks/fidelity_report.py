"""The tables, pictures and the file of runs of ``fidelity.py``."""

from __future__ import annotations

import json
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fidelity_moves import LATER
from sailord.text.table import table
from simulator.documents.files import load_document

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from sailord.plots.figure import write_figure
from sailord.plots.panels import KIND_COLOURS, KIND_NAMES
from sailord.plots.timeline import BarKind

SHOWN = "2 x PP 2, uneven"
"""The plan whose timelines are drawn."""
KINDS: Mapping[str, BarKind] = {
    "forward": "forward", "backward": "backward", "sync": "sync", "step": "optimizer"
}  # fmt: skip
MOVE_PHASES = ("detect", "plan", "quiesce", "fetch", "rebuild", "verify", "first_step")
SHORTEST_S = 1e-3
"""Shorter phases count as this long in ratios."""


def write_report(folder: Path) -> None:
    """Print the tables, and write them, the pictures and the runs into the folder."""
    runs: dict[str, Any] = json.loads((folder / "runs.json").read_text())
    rows = [row_of(name, run) for name, run in runs.items()]
    text = [*_table(rows), "", *summary_lines(rows)]
    moves_file = folder / "moves.json"
    moves = json.loads(moves_file.read_text()) if moves_file.exists() else []
    if moves:
        text += ["", *moves_table(moves)]
    print("\n".join(text))
    (folder / "report.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    write_figure(folder / "scatter.svg", lambda figure: _scatter(figure, rows))
    if SHOWN in runs:
        write_figure(folder / "timeline.svg", lambda figure: _timelines(figure, runs[SHOWN]))
    _write_runs(folder, runs)


def row_of(name: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report's lines about one plan."""
    predicted, measured = run["predicted"], run["measured"]
    return {
        "plan": name,
        "is_quiet": run["is_quiet"],
        "predicted_s": predicted["iteration_s"],
        "measured_s": measured["iteration_s"],
        "spread": measured["spread"],
        "waited": measured["waited"],
        "error": predicted["iteration_s"] / measured["iteration_s"] - 1,
        "error_bar": predicted["error_bar"],
        "memory_errors": [tensors / seen - 1 for tensors, seen in _memory(run)],
        "bytes_errors": {
            zones: sent / seen - 1 for zones, sent, seen in _bytes(run) if seen > 0 and sent > 0
        },
    }


def _memory(run: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """Yield each rank's predicted and measured bytes of tensors at the peak."""
    for rank in run["measured"]["ranks"]:
        place = rank["place"]
        parts = run["predicted"]["memory"][place["pipeline"]][place["stage"]]
        yield tensor_bytes(parts), rank["tensor_bytes"]


def tensor_bytes(parts: Mapping[str, float]) -> float:
    """Return the predicted bytes of live tensors, without what an allocator or a driver adds."""
    live = ("parameters", "gradients", "optimizer", "activations", "communication")
    # The model counts transients twice, for what a caching allocator keeps; a CPU has none.
    return sum(parts[name] for name in live) + parts["workspace"] / 2


def _bytes(run: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield predicted and measured bytes of a step from each zone to each other one."""
    seen: defaultdict[str, float] = defaultdict(float)
    for ends, size in run["measured"]["bytes"].items():
        begin, end = (f"zone-{node[0]}" for node in ends.split())
        if begin != end and "head" not in ends:
            seen[f"{begin} {end}"] += size
    for zones, size in seen.items():
        yield zones, run["predicted"]["bytes"].get(zones, 0.0), size


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    header = ("plan", "predicted", "measured", "error", "spread", "memory", "bytes", "quiet")
    cells = []
    for row in rows:
        times = (f"{row[name]:.3f} s" for name in ("predicted_s", "measured_s"))
        ranges = map(_range, (row["memory_errors"], list(row["bytes_errors"].values())))
        shares = (f"{row['error']:+.1%}", f"{row['spread']:.1%}")
        cells.append([row["plan"], *times, *shares, *ranges, "yes" if row["is_quiet"] else "no"])
    return table(header, cells).splitlines()


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{min(values):+.1%} {max(values):+.1%}"


def summary_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what holds for all plans together."""
    errors = [abs(row["error"]) for row in rows]
    memory = [abs(error) for row in rows for error in row["memory_errors"]]
    sent = [abs(error) for row in rows for error in row["bytes_errors"].values()]
    text = [
        f"iteration time: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}, "
        f"rank correlation {rank_correlation(rows):.3f}",
        f"inside their error bars: {sum(map(_is_inside, rows))} of {len(rows)} plans",
        f"memory: mean {statistics.mean(memory):.1%}, worst {max(memory):.1%} of a rank's tensors",
    ]
    if sent:
        mean, worst = statistics.mean(sent), max(sent)
        text.append(f"bytes: mean {mean:.1%}, worst {worst:.1%} of a direction")
    chosen = next((row for row in rows if row["plan"] == "chosen"), None)
    if chosen is not None:
        best = min((row for row in rows if "TP" not in row["plan"]), key=_measured_s)
        text.append(
            f"chosen by the planner: {chosen['measured_s']:.3f} s; best measured: "
            f"{best['plan']}, {best['measured_s']:.3f} s"
        )
    return text


def _is_inside(row: Mapping[str, Any]) -> bool:
    return abs(float(row["error"])) <= float(row["error_bar"])


def _measured_s(row: Mapping[str, Any]) -> float:
    return float(row["measured_s"])


def rank_correlation(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return Spearman's coefficient."""
    ranks = []
    for key in ("predicted_s", "measured_s"):
        order = sorted(row[key] for row in rows)
        ranks.append([order.index(row[key]) for row in rows])
    return statistics.correlation(*ranks)


def moves_table(moves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each move, and how far predictions are off by phase."""
    rows = []
    first: defaultdict[str, list[float]] = defaultdict(list)
    later: defaultdict[str, list[float]] = defaultdict(list)
    for move in moves:
        ratios = later if move["change"] in LATER else first
        seen, told = (dict(_pairs(move[key])) for key in ("phases", "predicted"))
        seen["downtime"], told["downtime"] = move["downtime_s"], move["predicted_s"]
        cells = []
        for name in ("downtime", *MOVE_PHASES):
            if name in seen and name in told:
                ratio = max(told[name], SHORTEST_S) / max(seen[name], SHORTEST_S)
                ratios[name].append(ratio)
                cells.append(f"{seen[name]:.2f} ({told[name]:.2f})")
            else:
                cells.append(f"{seen[name]:.2f} (-)" if name in seen else "-")
        rows.append([move["change"], *cells])
    text = table(("move", "downtime", *MOVE_PHASES), rows).splitlines()
    text.append("seconds measured (predicted); predicted over measured, geometric mean and range:")
    for title, ratios in (("first moves", first), ("later moves, by earlier ones", later)):
        text += [title] if ratios else []
        for name, found in ratios.items():
            mean = statistics.geometric_mean(found)
            text.append(f"  {name:<12}{mean:>6.2f}  {min(found):.2f} to {max(found):.2f}")
    return text


def _pairs(phases: Any) -> Iterator[tuple[str, float]]:
    yield from phases.items() if isinstance(phases, dict) else phases


# -- docs/accuracy.md -----------------------------------------------------------------------------

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
PLANS = ("| plan | micro batch;", "- **Time**: the median")
MOVES = ("Moves of a running job by sailord", "The first step is predicted")
"""Where the tables begin in the document, and what comes after them."""


def write_document(folder: Path) -> None:
    """Replace the tables and pictures of docs/accuracy.md by those of a folder."""
    runs: dict[str, Any] = json.loads((folder / "runs.json").read_text())
    rows = [row_of(name, run) for name, run in runs.items()]
    lines = [
        "| plan | micro batch; micro batches: node, layers | predicted | measured | error |"
        " spread | memory | bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row["plan"] if row["is_quiet"] else f"{row['plan']} (disturbed)",
            _shape(runs[row["plan"]]["plan"]),
            f"{row['predicted_s']:.3f} s",
            f"{row['measured_s']:.3f} s",
            _percent(row["error"]),
            f"{row['spread']:.1%}".replace("%", " %"),
            _percents(row["memory_errors"]),
            _percents(list(row["bytes_errors"].values())),
        )
        lines.append(f"| {' | '.join(cells)} |")
    plans = "\n".join([*lines, "", "```text", *summary_lines(rows), "```"])
    text = _replace_between(DOCUMENT.read_text(encoding="utf-8"), PLANS, plans)
    moves = json.loads((folder / "moves.json").read_text())
    told = "\n".join(
        [f"{MOVES[0]}, seconds measured (predicted):", "", "```text", *moves_table(moves), "```"]
    )
    DOCUMENT.write_text(_replace_between(text, MOVES, told), encoding="utf-8")
    for name in ("scatter", "timeline"):
        shutil.copyfile(
            folder / f"{name}.svg", DOCUMENT.parent / "pictures" / f"fidelity-{name}.svg"
        )


def _replace_between(text: str, ends: tuple[str, str], new: str) -> str:
    begin, end = (text.index(mark) for mark in ends)
    return f"{text[:begin]}{new}\n\n{text[end:]}"


def _shape(plan: Mapping[str, Any]) -> str:
    """Return a plan in a few words."""
    pipelines = []
    for pipeline in plan["pipelines"]:
        stages = [
            stage["node"]
            + (f"\u00d7{stage['tp']}" if stage["tp"] > 1 else "")
            + (
                f" {stage['layers'][0]}-{stage['layers'][1] - 1}"
                if len(pipeline["stages"]) > 1
                else ""
            )
            for stage in pipeline["stages"]
        ]
        pipelines.append(f"{pipeline['micro_batches']}: {' '.join(stages)}")
    return f"{plan['micro_batch_size']}; {' / '.join(pipelines)}"


def _percent(value: float) -> str:
    return f"{value:+.1%}".replace("-", "\u2212").replace("%", " %")


def _percents(values: Sequence[float]) -> str:
    if not values:
        return "\u2013"
    return " to ".join(dict.fromkeys((_percent(min(values)), _percent(max(values)))))


# -- pictures ------------------------------------------------------------------------------------


def _scatter(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator  # noqa: PLC0415 - an optional package

    figure.set_size_inches(5.2, 4.6)
    axes = figure.subplots()
    times = [row[key] for row in rows for key in ("predicted_s", "measured_s")]
    low, high = 0.9 * min(times), 1.1 * max(times)
    axes.fill_between([low, high], [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high],
                      color="#EEEEEE", label="within 20 %")  # fmt: skip
    axes.plot([low, high], [low, high], color="#555555", linewidth=0.8)
    axes.scatter([row["measured_s"] for row in rows], [row["predicted_s"] for row in rows],
                 s=14, color="#0072B2")  # fmt: skip
    for row in rows:
        axes.annotate(row["plan"], (row["measured_s"], row["predicted_s"]), fontsize=5,
                      xytext=(3, -3), textcoords="offset points")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [tick for tick in (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0) if low < tick < high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("measured, s")
    axes.set_ylabel("predicted, s")
    axes.set_title("Seconds of an iteration")
    axes.legend(loc="upper left", frameon=False)
    figure.tight_layout()


def _timelines(figure: Figure, run: Mapping[str, Any]) -> None:
    """Draw one iteration: each rank measured, and below it as predicted."""
    ranks = run["measured"]["ranks"]
    begin = min(span["start_ns"] for rank in ranks for span in rank["spans"])
    figure.set_size_inches(9, 0.9 + 0.62 * len(ranks))
    axes = figure.subplots()
    for top, rank in enumerate(ranks):
        place = rank["place"]
        seen = [
            (
                KINDS[span["activity"]],
                (span["start_ns"] - begin) / 1e9,
                (span["end_ns"] - begin) / 1e9,
            )
            for span in rank["spans"]
            if span["activity"] in KINDS and span["end_ns"]
        ]
        told = [
            (kind, start, end)
            for row in run["predicted"]["timeline"]
            if (row["pipeline"], row["stage"]) == (place["pipeline"], place["stage"])
            for kind, start, end, _ in row["bars"]
        ]
        _bars(axes, seen, top, 0.42)
        _bars(axes, told, top + 0.46, 0.34, alpha=0.55)
    axes.set_ylim(len(ranks), -0.2)
    axes.set_yticks([top + 0.4 for top in range(len(ranks))])
    axes.set_yticklabels([f"{rank['node']}, layers {_layers_of(rank['place'])}" for rank in ranks])
    axes.set_xlabel("seconds; upper bars measured, lower ones predicted")
    for kind in KIND_NAMES:
        axes.barh(0, 0, color=KIND_COLOURS[kind], label=KIND_NAMES[kind])
    axes.legend(loc="upper right", frameon=False, ncols=4, bbox_to_anchor=(1, 1.12))
    figure.tight_layout()


def _layers_of(place: Mapping[str, Any]) -> str:
    """Return the layers of a rank; a record from before there were chunks has one range."""
    spans = (
        [chunk["layers"] for chunk in place["chunks"]] if "chunks" in place else [place["layers"]]
    )
    return ", ".join(f"{begin}-{end - 1}" for begin, end in spans)


def _bars(
    axes: Axes, bars: Sequence[tuple[BarKind, float, float]], top: float, height: float, *,
    alpha: float = 1.0,
) -> None:  # fmt: skip
    for kind, start, end in sorted(bars, key=lambda bar: bar[0] != "sync"):
        share = 1.0 if kind == "sync" else 0.72
        axes.broken_barh([(start, end - start)], (top, height * share), color=KIND_COLOURS[kind],
                         alpha=alpha, linewidth=0)  # fmt: skip


# -- the file of runs ----------------------------------------------------------------------------


def _write_runs(folder: Path, runs: Mapping[str, Any]) -> None:
    """Write what ``sailorctl validate`` reads; profiles and links are the folder's."""
    job = load_document(folder / "job.toml").data
    cluster = load_document(folder / "machines.toml").data
    listed = [
        {
            "id": name,
            "source": "shaped cluster",
            "job": {**job, "data": {}},
            "cluster": {"pool": cluster["pool"]},
            "plan": run["plan"],
            "measured": {"iteration_s": run["measured"]["iteration_s"]},
        }
        for name, run in runs.items()
    ]
    (folder / "validate.json").write_text(json.dumps({"runs": listed}, indent=1) + "\n")
