"""Events as lines for people: one for each reconfiguration, and one for repeats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sailord.text.units import timestamp

OF_NODES = ("node_lost", "node_preempted")
"""Events of nodes that are left out if they led to a reconfiguration, whose line names the node."""


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
    """Return one line for each event, oldest first, with these exceptions.

    A reconfiguration has one line at its end; while it is under way, its latest part is shown. A
    text that repeats before the next reconfiguration has one line, with the time of the last and
    the count. Of checkpoints in a row the last is shown.
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
        # A job's end or hold appears twice: as an event, and as a transition.
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
