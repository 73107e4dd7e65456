"""Counts who is blamed for injected hangs: ``python -m tests.worker.distributed.hang_table FILE``.

Each result is a line of the file, so that a run may be interrupted and continued.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.worker.distributed.hang_runs import KINDS, run_clean, run_fault

PIECE = 500
"""Clean steps in a row, under one plan."""


def main() -> None:
    """Inject the faults that are missing, train the clean steps that are missing, and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    wishes = parser.parse_args()
    end_s = time.monotonic() + 60 * wishes.minutes
    done = read(wishes.file)
    with wishes.file.open("a", encoding="utf-8") as file:
        for name, number in missing(done, wishes.faults, wishes.steps):
            if time.monotonic() > end_s:
                break
            found = run_fault(number) if name == "fault" else run_clean(number, PIECE)
            line = {name: number, **asdict(found)}
            done.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
    print("\n".join(table(done)))


def read(path: Path) -> list[dict[str, Any]]:
    """Read what was done; older lines name the verdicts otherwise."""
    if not path.exists():
        return []
    done = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"verdicts" if key == "voices" else key: line[key] for key in line} for line in done]


def missing(done: Sequence[dict[str, Any]], faults: int, steps: int) -> Iterator[tuple[str, int]]:
    """Yield what is still to be run: a piece of clean steps after each fault."""
    begun = {(name, line[name]) for line in done for name in ("fault", "clean") if name in line}
    pieces = -(-steps // PIECE)
    for number in range(max(faults, pieces)):
        if number < faults and ("fault", number) not in begun:
            yield "fault", number
        if number < pieces and ("clean", number) not in begun:
            yield "clean", number


def table(done: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of the faults, and one about clean steps."""
    columns = "fault", "injected", "right by all ranks", "verdicts", "right"
    yield f"| {' | '.join(columns)} | named after (median, most) |"
    yield "|---|---|---|---|---|---|"
    faults = [line for line in done if "fault" in line]
    for kind in [*KINDS, "all"]:
        these = [line for line in faults if kind in {"all", line["kind"]}]
        if not these:
            continue
        right = sum(0 < line["verdicts"] == line["right"] for line in these)
        verdicts, rights = (sum(line[name] for line in these) for name in ("verdicts", "right"))
        named = [line["named_s"] for line in these if line["named_s"] is not None]
        times = f"{statistics.median(named):.1f} s, {max(named):.1f} s" if named else "never"
        yield f"| {kind} | {len(these)} | {right} | {verdicts} | {rights} | {times} |"
    clean = [line for line in done if "clean" in line]
    if clean:
        alarms = [alarm for line in clean for alarm in line["alarms"]]
        longest = max(line["longest_wait_s"] for line in clean)
        yield ""
        yield (
            f"{sum(line['steps'] for line in clean):,} clean steps: {len(alarms)} alarms; the "
            f"longest wait took {longest:.2f} s"
        )
        yield from (f"  {alarm}" for alarm in alarms[:20])
    for line in faults:
        if not line["verdicts"] or line["wrong"]:
            verdicts = "; ".join(line["wrong"]) or "no rank blamed any"
            yield f"fault {line['fault']} ({line['kind']} {line['place']}): {verdicts}"


if __name__ == "__main__":
    main()
