"""The screen of ``sailorctl up``: the cluster's status, its nodes and the last events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import click

from sailord.client import default_folder
from sailord.local.paths import Place
from sailord.text.cluster_text import nodes_text, status_text

LINES_KEPT = 8
HINTS = """\
in another terminal:
  sailorctl preempt NODE --notice 30      announce that a node goes in 30 s
  sailorctl local kill NODE               kill a node without notice
  sailorctl local add large@zone-a        add a node (large or small, zone-a to zone-c)
  sailorctl drain NODE                    move the job off a node, losing no step
  sailorctl status, nodes, events -f, why, logs NODE
Ctrl-C here ends the cluster and deletes its files."""


def hints_of(place: Place) -> str:
    """Return the hints, with the address of a cluster that is not in the default folder."""
    if place.folder == default_folder():
        return HINTS
    found = f"with SAILOR_SERVER=unix://{place.socket} (and local with --folder {place.folder}):"
    return HINTS.replace("in another terminal:", f"in another terminal, {found}", 1)


@dataclass(eq=False)
class Screen:
    """Redraws a terminal, or appends only new lines to a file."""

    is_terminal: bool
    hints: str = HINTS
    _last: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))

    def say(self, line: str) -> None:
        """Add a line."""
        self._last.append(line)
        if not self.is_terminal:
            click.echo(line)

    def draw(self, status: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
        """Show the status and the nodes, if this is a terminal."""
        if self.is_terminal:
            click.clear()
            shown = (status_text(status), nodes_text(nodes), "\n".join(self._last), self.hints)
            click.echo("\n\n".join(filter(None, shown)))
