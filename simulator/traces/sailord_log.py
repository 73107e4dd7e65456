"""Reads `availability.jsonl`, sailord's log of the GPUs that are up; leaves out damaged lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

OLDER = ".1"
"""What sailord appends to the name of a log when it begins a new one."""
TIMES_END_S = 253_402_300_800
"""Seconds from 1970 to the year 10000, where dates end."""
COUNT_MAX = 10**7
"""Far above any log; more nodes or GPUs are a mistake."""
Counts = Mapping[str, int]
"""GPUs by pool, named ``<gpu>@<zone>``."""

_ANY_LINE = re.compile(r'^\s*\{\s*"at"\s*:', re.MULTILINE)
_TIME = re.compile(r'\{"at": (\d{1,12}(?:\.\d{1,9})?),')
_POOL = re.compile(r"[^@\s]+@[^@\s]+( spot)?")
_TOLD_MAX = 5
"""How many damaged lines of a file are told one by one."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """From ``at_s`` on, the GPUs of each pool; ``None``: the line is damaged."""

    number: int
    at_s: float
    gpus: Counts | None
    flaw: str = ""


def is_sailord_log(text: str) -> bool:
    """Whether any line of a text begins as sailord's do."""
    return _ANY_LINE.search(text) is not None


def read_lines(text: str) -> list[LogLine]:
    """Read all lines.

    A damaged line begins at its time if that can be read and lies between those of its neighbours,
    otherwise at the time of the line before.
    """
    found = [_line_of(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    after_s = inf
    ends_s: list[float] = []
    for line in reversed(found):
        ends_s.append(after_s)
        after_s = after_s if line.gpus is None else line.at_s
    before_s = -inf
    for index, (line, end_s) in enumerate(zip(found, reversed(ends_s), strict=True)):
        if line.gpus is None:
            at_s = line.at_s if before_s <= line.at_s <= end_s else before_s
            found[index] = LogLine(line.number, at_s, None, line.flaw)
        else:
            before_s = line.at_s
    return found


def counts_over_time(logs: Iterable[Sequence[LogLine]]) -> list[tuple[float, Counts]]:
    """Merge the logs of successive leaders; the latest line holds.

    What a damaged line counted is unknown: from its time to the next line, each pool has the lesser
    of the counts before and after it. Nothing is known before the first line and after the last.
    """
    lines = sorted((line for log in logs for line in log), key=lambda line: line.at_s)
    pools = {pool: 0 for line in lines for pool in line.gpus or ()}
    points: list[tuple[float, Counts]] = []
    damaged_at_s: float | None = None
    for line in lines:
        if line.gpus is None:
            damaged_at_s = line.at_s if damaged_at_s is None else damaged_at_s
            continue
        counts = pools | dict(line.gpus)
        if points and damaged_at_s is not None:
            before = points[-1][1]
            least = {pool: min(before[pool], count) for pool, count in counts.items()}
            points.append((damaged_at_s, least))
        points.append((line.at_s, counts))
        damaged_at_s = None
    return points


def damage_of(name: str, lines: Sequence[LogLine]) -> list[str]:
    """Say which lines of a file are left out, and what that means for its counts."""
    told: list[str] = []
    damaged = 0
    next_number: int | None = None
    for line in reversed(lines):
        if line.gpus is not None:
            next_number = line.number
            continue
        damaged += 1
        then = "the counts after the line before it are unknown"
        if next_number is not None:
            then = f"until line {next_number} each pool has the lesser count of before and after"
        told.append(f"{name}: line {line.number} is left out, {line.flaw}: {then}")
    told.reverse()
    more = damaged - _TOLD_MAX
    return told[:_TOLD_MAX] + ([f"{name}: so are {more} more damaged lines"] if more > 0 else [])


def whole_number(value: object) -> int:
    """Return a number of nodes or GPUs."""
    try:
        count = float(value)  # type: ignore[arg-type]  # what is no number raises an error
    except (TypeError, ValueError, OverflowError):
        count = -1.0
    if not 0 <= count <= COUNT_MAX or count != int(count):
        raise ValueError(f"{value} is not a number of nodes or GPUs")
    return int(count)


def _line_of(number: int, line: str) -> LogLine:
    try:
        entry = json.loads(line)
        at_s, gpus = float(entry["at"] + 0), entry["gpus"].items()
        if not 0 <= at_s < TIMES_END_S:
            raise ValueError(f"{at_s:g} s is not a time in seconds from 0 to the year 9999")
        return LogLine(number, at_s, {_pool(pool): whole_number(n) for pool, n in gpus})
    except json.JSONDecodeError as error:
        flaw = f"not valid JSON ({error.msg}, column {error.colno})"
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        flaw = 'not of the form {"at": SECONDS, "gpus": {"GPU@ZONE": COUNT}}'
    except ValueError as error:
        flaw = str(error)
    time = _TIME.match(line)
    return LogLine(number, float(time[1]) if time else -inf, None, flaw)


def _pool(name: str) -> str:
    if not _POOL.fullmatch(name):
        raise ValueError(f'"{name}" is not a pool, as GPU@ZONE')
    return name
