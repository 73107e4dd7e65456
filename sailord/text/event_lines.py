"""Events as lines for people: one for each reconfiguration, repeats told once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sailord.text.units import timestamp

OF_NODES = ("node_lost", "node_preempted")
"""Events of nodes: the line of the reconfiguration that they led to names the node as well."""


@dataclass(frozen=True, slots=True)
class EventLine:
    """One line: what happened, last at ``at``, and how often."""

    at: float
    text: str
    kind: str
    job: str | None = None
    node: str | None = None
    times: int = 1

    @property
    def said(self) -> str:
        """The text, with the number of repeats."""
        if self.times == 1:
            return self.text
        is_checkpoint = self.kind == "checkpoint_committed"
        return f"{self.text} ({self.times} {'checkpoints' if is_checkpoint else 'times'})"


def fold(events: Iterable[Mapping[str, Any]]) -> list[EventLine]:
    """Return the lines that tell these events, oldest first.

    The parts of a reconfiguration are left out, but for the last of one that is under way: one line
    sums it up at its end. A text that comes
    again before the next reconfiguration is told once, at its last time, with its number; of
    checkpoints that follow each other, the last.
    """
    lines: list[EventLine] = []
    since = 0  # The first line after the last reconfiguration.
    under_way: EventLine | None = None
    for event in events:
        fresh = _line(event)
        if event.get("is_detail"):
            under_way = fresh
            continue
        if under_way is not None and fresh.job == under_way.job:
            under_way = None
        if fresh.kind == "reconfigured":
            lines[since:] = [line for line in lines[since:] if not _is_told_by(line, fresh)]
            lines.append(fresh)
            since = len(lines)
            continue
        # What is told of a job's end or hold, its transition tells again.
        lines[since:] = [line for line in lines[since:] if not _is_said_by(line, fresh)]
        found = next((n for n in range(since, len(lines)) if _repeats(lines[n], fresh)), None)
        if found is not None:
            fresh = replace(fresh, times=lines.pop(found).times + 1)
        lines.append(fresh)
    return lines if under_way is None else [*lines, under_way]


def _line(event: Mapping[str, Any]) -> EventLine:
    job, node = event.get("job"), event.get("node")
    return EventLine(event["at"], event["text"], event["kind"], job, node)


def _is_told_by(line: EventLine, summary: EventLine) -> bool:
    if line.kind not in OF_NODES or line.node is None:
        return False
    return re.search(rf"(?<![\w-]){re.escape(line.node)}(?![\w-])", summary.text) is not None


def _is_said_by(line: EventLine, fresh: EventLine) -> bool:
    kinds = ("transition", "job_held", "job_finished")
    if line.kind == fresh.kind or line.kind not in kinds or fresh.kind not in kinds:
        return False
    return line.job == fresh.job and fresh.text in (line.text, f"held: {line.text}")


def _repeats(line: EventLine, fresh: EventLine) -> bool:
    if (line.kind, line.job) != (fresh.kind, fresh.job):
        return False
    return line.text == fresh.text or fresh.kind == "checkpoint_committed"


def line_text(line: EventLine) -> str:
    """Return a line with its time and its job."""
    about = f"{line.job}: " if line.job else ""
    return f"{timestamp(line.at)}  {about}{line.said}"
