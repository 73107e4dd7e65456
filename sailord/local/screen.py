"""What `sailorctl up` shows: the cluster's status, its nodes, and what happened last."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import click

from sailord.local.paths import Place, usual_folder
from sailord.text.cluster_text import event_text, nodes_text, status_text

LINES_KEPT = 8
HINTS = """\
in another terminal:
  sailorctl preempt NODE --notice 30      the cloud takes a machine away in 30 s
  sailorctl local kill NODE               it takes one away without a word
  sailorctl local add large@zone-a        a machine comes (large or small, zone-a to zone-c)
  sailorctl drain NODE                    a machine is given back, with nothing lost
  sailorctl status, nodes, events -f, why, logs NODE
Ctrl-C here ends all of it, and leaves nothing behind."""


def hints_of(place: Place) -> str:
    """What else can be done, and what makes the commands find a cluster at an unusual place."""
    if place.folder == usual_folder():
        return HINTS
    found = f"with SAILOR_SERVER=unix://{place.socket} (and local with --folder {place.folder}):"
    return HINTS.replace("in another terminal:", f"in another terminal, {found}", 1)


@dataclass(eq=False)
class Screen:
    """A terminal that is drawn anew, or a file to which only what is new is added."""

    is_terminal: bool
    hints: str = HINTS
    _last: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))

    def say(self, line: str) -> None:
        """Tell one thing that happened."""
        self._last.append(line)
        if not self.is_terminal:
            click.echo(line)

    def hear(self, happenings: Iterable[dict[str, Any]]) -> None:
        """Tell what sailord says that happened."""
        for happening in happenings:
            self.say(event_text(happening))

    def draw(self, status: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
        """Show how everything stands."""
        if self.is_terminal:
            click.clear()
            shown = (status_text(status), nodes_text(nodes), *self._story(), self.hints)
            click.echo("\n\n".join(shown))

    def _story(self) -> tuple[str, ...]:
        return ("\n".join(self._last),) if self._last else ()
