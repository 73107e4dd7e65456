"""Prints the progress of a run: a line for each step, and the remaining time on a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_CLEAR = "\r\x1b[K"
_MIB = 2**20
_BAR = 24


@dataclass(slots=True)
class ProgressDisplay:
    """Prints steps to stdout; on a terminal, also shows the remaining time."""

    steps: int
    as_json: bool
    _begin_s: float = field(default_factory=time.monotonic)
    """When the first step ended: it takes longer than the others."""
    _done: int = 0

    def __enter__(self) -> ProgressDisplay:
        self._show(f"starting, {self.steps} steps to go")
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")

    def step(self, line: dict[str, Any]) -> None:
        """Print a step."""
        self._show("")
        print(json.dumps(line) if self.as_json else _format_duration(line), flush=True)
        each_s = line["seconds"]
        if self._done == 0:
            self._begin_s = time.monotonic()
        else:
            each_s = (time.monotonic() - self._begin_s) / self._done
        self._done += 1
        left_s = (self.steps - self._done) * each_s
        self._show(f"{_bar(self._done / self.steps)} {self._done} of {self.steps}, {_rate(line)}, "
                   f"{_about(left_s)} left")  # fmt: skip

    def evaluation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Print the metrics of an evaluation."""
        if self.as_json:
            print(json.dumps({"step": step, "evaluation": metrics}), flush=True)
            return
        self._show("")
        figures = "  ".join(
            f"{name} none" if value is None else f"{name} {value:.5f}"
            for name, value in metrics.items()
        )
        print(f"evaluation after step {step}: {figures}", flush=True)

    def finish(self, ranks: list[dict[str, Any]]) -> None:
        """Print each rank's peak memory to stderr."""
        if self.as_json:
            print(json.dumps({"ranks": ranks}), file=sys.stderr)
            return
        held = [", ".join(f"{a}-{end - 1}" for a, end in rank["layers"]) for rank in ranks]
        width = max(7, *map(len, held))
        print(f"rank  pipeline  stage  {'layers':{width}}  peak memory", file=sys.stderr)
        for rank, layers in zip(ranks, held, strict=True):
            print(
                f"{rank['rank']:4}  {rank['pipeline']:8}  {rank['stage']:5}  "
                f"{layers:{width}}  {rank['peak_memory_bytes'] / _MIB:7.1f} MiB",
                file=sys.stderr,
            )

    def _show(self, text: str) -> None:
        """Replace the last line, if stderr is a terminal."""
        if not self.as_json and sys.stderr.isatty():
            print(f"{_CLEAR}{text}", end="", file=sys.stderr, flush=True)


def _format_duration(line: dict[str, Any]) -> str:
    loss, norm = (
        "none" if line[key] is None else f"{line[key]:.5f}" for key in ("loss", "grad_norm")
    )
    more = ""
    if line.get("skipped"):
        more = f"  skipped: not finite ({line['skipped_steps']} so far)"
    elif line["skipped_steps"]:
        more = f"  {line['skipped_steps']} skipped so far"
    if "data_wait_s" in line:
        more += f"  waited {line['data_wait_s'] / line['seconds']:.0%} of it for data"
    return (
        f"step {line['step']:<6} loss {loss:<10} norm {norm:<9} lr {line['learning_rate']:<8.3g} "
        f"{_rate(line):<16}  {line['seconds']:.3f} s  {line['sample_hash']}{more}"
    )


def _rate(line: dict[str, Any]) -> str:
    """Return how fast a step was: tokens where the loss counts them, else samples; and MFU."""
    tokens, mfu = line.get("tokens_per_s"), line.get("mfu")
    rate = (
        f"{line['samples_per_s']:,.1f} samples/s" if tokens is None else f"{tokens:,.0f} tokens/s"
    )
    return rate if mfu is None else f"{rate}, {mfu:.0%} MFU"


def _bar(done: float) -> str:
    """Draw a progress bar."""
    full = round(_BAR * done)
    return f"[{'#' * full}{'.' * (_BAR - full)}]"


def _about(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
