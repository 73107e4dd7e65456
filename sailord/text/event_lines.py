"""Events as lines for people: one for each reconfiguration, and one for repeats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sailord.text.causes import NAMES_MAX, first_names
from sailord.text.units import timestamp

OF_NODES = {"node_lost": "are lost", "node_preempted": "are draining"}
"""Events of nodes, and the words for many of one kind; they are left out if they led to a
reconfiguration whose line names the node."""
BURST_S = 60.0
"""Events of nodes that are further apart than this are not told together."""


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


LineKey = tuple[str, str | None, str]
ENDS = ("transition", "job_held", "job_finished")
"""Kinds of events that tell how a job ended."""


class EndsOnce:
    """Recognises the second of the two events, one a transition, of a job's end or hold."""

    def __init__(self) -> None:
        self._first: dict[str | None, tuple[str, str]] = {}

    def is_second(self, event: Mapping[str, Any]) -> bool:
        """Return whether the event says what one before it has said."""
        kind, job = event["kind"], event.get("job")
        if kind not in ENDS:
            return False
        text = event["text"].removeprefix("held: ")
        first = self._first.pop(job, None)
        if first is not None and first[0] != kind and first[1] == text:
            return True
        self._first[job] = kind, text
        return False


def fold(events: Iterable[Mapping[str, Any]]) -> list[EventLine]:
    """Return one line for each event, oldest first, with these exceptions.

    A reconfiguration has one line at its end; while it is under way, its latest part is shown. A
    text that repeats before the next reconfiguration has one line, with the time of the last and
    the count; so do many nodes that were lost, or drain. Each order has a line. Of checkpoints in a
    row the last is shown.
    """
    lines: list[EventLine] = []
    window: dict[LineKey, EventLine] = {}  # What came after the last reconfiguration.
    under_way: EventLine | None = None
    for event in events:
        fresh = _line(event)
        if event.get("is_detail"):
            under_way = fresh
            continue
        if under_way is not None and fresh.job == under_way.job:
            under_way = None
        if fresh.kind == "reconfigured":
            lines += _together(line for line in window.values() if not _is_told_by(line, fresh))
            lines.append(fresh)
            window.clear()
            continue
        # A job's end or hold appears twice: as an event, and as a transition.
        for kind in ENDS if fresh.kind in ENDS else ():
            if kind != fresh.kind:
                window.pop((kind, fresh.job, fresh.text), None)
                window.pop((kind, fresh.job, fresh.text.removeprefix("held: ")), None)
        key = _key(fresh)
        before = window.pop(key, None)
        window[key] = fresh if before is None else replace(fresh, times=before.times + 1)
    return [*lines, *_together(window.values()), *([] if under_way is None else [under_way])]


def _line(event: Mapping[str, Any]) -> EventLine:
    job, node = event.get("job"), event.get("node")
    return EventLine(event["at"], event["text"], event["kind"], job, node)


def _together(lines: Iterable[EventLine]) -> list[EventLine]:
    """Tell of more nodes of one kind of event than can be named in one line, where the last was.

    Only of those soon after one another: others have causes of their own.
    """
    found = list(lines)
    for kind, word in OF_NODES.items():
        for of in _bursts(line for line in found if line.kind == kind and line.node is not None):
            names = [*dict.fromkeys(line.node for line in of if line.node is not None)]
            if len(names) > NAMES_MAX:
                last = replace(of[-1], text=f"{first_names(names)} {word}", node=None, times=1)
                told = {id(line) for line in of[:-1]}
                found = [last if line is of[-1] else line for line in found if id(line) not in told]
    return found


def _bursts(lines: Iterable[EventLine]) -> list[list[EventLine]]:
    """Lines in their order, parted where ``BURST_S`` passed without one."""
    found: list[list[EventLine]] = []
    for line in lines:
        if found and line.at <= found[-1][-1].at + BURST_S:
            found[-1].append(line)
        else:
            found.append([line])
    return found


def _is_told_by(line: EventLine, summary: EventLine) -> bool:
    if line.kind not in OF_NODES or line.node is None:
        return False
    return re.search(rf"(?<![\w-]){re.escape(line.node)}(?![\w-])", summary.text) is not None


def _key(line: EventLine) -> LineKey:
    """What is equal in lines that are told as one."""
    is_checkpoint = line.kind == "checkpoint_committed"
    at = f"{line.at} " * (line.kind == "order")  # Each is told: an opposite may lie between.
    return line.kind, line.job, "" if is_checkpoint else at + line.text


def line_text(line: EventLine) -> str:
    """Return a line with its time and its job."""
    about = f"{line.job}: " if line.job else ""
    return f"{timestamp(line.at)}  {about}{line.said}"
