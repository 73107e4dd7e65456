"""``status -w`` on a terminal: asks sailord every second, and handles keys in between."""

from __future__ import annotations

import time

from sailord.client import Client, ServerProblem
from sailord.screen.poller import Poller
from sailord.screen.terminal import Terminal
from sailord.screen.ui import Asked, Ui, after_key
from sailord.screen.view import back_max, screen

LOOK_S = 1.0


def watch(client: Client, job: str | None = None) -> str:
    """Watch until q or Ctrl-C; return a summary. Raises if the first request is not answered.

    ``job``: the one to show first, where several share the cluster.
    """
    poller, ui = Poller(client, job), Ui()
    poller.look()
    look_at = time.monotonic() + LOOK_S
    with Terminal() as terminal:
        try:
            while True:
                draw(terminal, poller, ui)
                for key in terminal.wait(look_at - time.monotonic()):
                    ui, asked = take(terminal, poller, ui, key)
                    if asked is not None and asked.kind == "quit":
                        return poller.summary()
                    if asked is not None:
                        poller.order(asked)
                        look_at = time.monotonic()
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + LOOK_S
                    try:
                        poller.look()
                    except ServerProblem as problem:
                        if not problem.passes:
                            raise
        except KeyboardInterrupt:
            return poller.summary()


def take(terminal: Terminal, poller: Poller, ui: Ui, key: str) -> tuple[Ui, Asked | None]:
    """Return what a key changes, and what it orders."""
    there = [node["name"] for node in poller.seen.nodes if node["state"] != "lost"]
    return after_key(ui, key, there, back_max(poller.seen, *terminal.size))


def draw(terminal: Terminal, poller: Poller, ui: Ui) -> None:
    """Draw the last answers."""
    terminal.draw(screen(poller.seen, ui, *terminal.size, is_ascii=terminal.is_ascii))
