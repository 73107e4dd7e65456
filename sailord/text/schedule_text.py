"""One step of a job's plan as rows of letters: as predicted, and as measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sailord.text.units import duration

WIDTH = 60
"""Letters of a row, which is as long as the longer of both steps."""
IDLE = "."
UPDATE, SUM = "U", "S"
SMALL = "\n              small letters: less than half of their time"
_LIFE = re.compile(r"\.[0-9a-f]+\.[0-9]+$")
"""The part of a node's id after its name."""


def schedule_text(found: Mapping[str, Any]) -> str:
    """Return the rows of each stage, under what both steps took."""
    predicted, measured = found["timeline"], found["measured"]
    if predicted is None:
        return f"there is no schedule: {found['why_none']}"
    length_s = max(predicted["iteration_s"], 0.0 if measured is None else measured["length_s"])
    lines = [_head(predicted, measured, length_s)]
    seen = {} if measured is None else {each["number"]: each for each in measured["pipelines"]}
    for pipeline in predicted["pipelines"]:
        number, *alike = pipeline["numbers"]
        more = f", and {len(alike)} more like it" if alike else ""
        lines += ["", f"pipeline {number}{more}"]
        rows = seen.get(number, {}).get("groups", ())
        for index, group in enumerate(pipeline["groups"]):
            ran = rows[index] if index < len(rows) else None
            lines += _group_lines(group, ran, length_s)
    if (hidden := predicted["shapes"] - len(predicted["pipelines"])) > 0:
        lines += ["", f"{hidden} more pipelines, which differ from these, are not shown"]
    return "\n".join(lines)


def _head(predicted: Mapping[str, Any], measured: Mapping[str, Any] | None, length_s: float) -> str:
    said = f"a step is predicted to take {duration(predicted['iteration_s'])}"
    if measured is None:
        said += "; none was measured yet"
    else:
        took, ago = duration(measured["length_s"]), duration(measured["age_s"])
        said += f"; step {measured['step']:,} took {took}, {ago} ago"
    letters = f"F forward, B backward, {UPDATE} update, {SUM} sums alone, {IDLE} nothing"
    return f"{said}\neach letter is {length_s / WIDTH * 1e3:.3g} ms: {letters}"


def _group_lines(
    group: Mapping[str, Any], ran: Mapping[str, Any] | None, length_s: float
) -> list[str]:
    first, end = group["layers"]
    where = _LIFE.sub("", group["node"]) or group["zone"]
    lines = [
        f"  stage {group['stage']}, layers {first} to {end - 1}, "
        f"{group['tp']} x {group['gpu']} of {where}"
    ]
    lines.append(f"    predicted {_row(group, length_s)}")
    if ran is not None:
        row = ran["why_none"] or _row(ran, length_s)
        lines.append(f"    measured  {row}")
    return lines


def _row(group: Mapping[str, Any], length_s: float) -> str:
    """Return the work of most of the time of each letter, if that is half of it; else the sums."""
    spans = [(kind, begin, end) for kind, begin, end, *_ in group["passes"]]
    if len(group["update"]) == 2:
        spans.append((UPDATE, *group["update"]))
    letters = _letters(spans, length_s)
    sums = _letters([(SUM, *times) for times in group["sync"]], length_s)
    row = "".join(b if a == IDLE else a for a, b in zip(letters, sums, strict=True))
    if row.strip(IDLE) or not spans:
        return row
    return f"{_letters(spans, length_s, share_min=0.0).lower()}{SMALL}"


def _letters(
    spans: Iterable[tuple[str, float, float]], length_s: float, share_min: float = 0.5
) -> str:
    letter_s = length_s / WIDTH
    shares: list[dict[str, float]] = [{} for _ in range(WIDTH)]
    for kind, begin, end in spans:
        for n in range(max(int(begin / letter_s), 0), min(int(end / letter_s) + 1, WIDTH)):
            inside = min(end, (n + 1) * letter_s) - max(begin, n * letter_s)
            shares[n][kind] = shares[n].get(kind, 0.0) + max(inside, 0.0)
    return "".join(_letter(share, letter_s * share_min) for share in shares)


def _letter(share: Mapping[str, float], least_s: float) -> str:
    if not share or sum(share.values()) < least_s:
        return IDLE
    return max(share, key=lambda kind: share[kind])
