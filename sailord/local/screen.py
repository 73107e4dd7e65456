"""`sailorctl up` while the cluster runs: restarts killed processes, and shows the screen."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import click

from sailord.client import ServerProblem, default_folder
from sailord.local.cluster import LocalCluster
from sailord.local.control import Control
from sailord.local.paths import LocalFolders
from sailord.local.signals import Ended
from sailord.screen.poller import Poller
from sailord.screen.terminal import Terminal, is_usable
from sailord.screen.ui import Asked, Ui
from sailord.screen.watch import draw, take
from sailord.text.cluster_text import event_text
from sailord.text.printable import printable

LOOK_S = 1.0
HINTS = """\
in another terminal:
  sailorctl preempt NODE --notice 30      announce that a node goes in 30 s
  sailorctl local kill NODE               kill a node without notice
  sailorctl local add large@zone-a        add a node (large or small, zone-a to zone-c)
  sailorctl drain NODE                    move the job off a node, losing no step
  sailorctl status, nodes, events -f, why, logs NODE
Ctrl-C here ends the cluster and deletes its files."""


def hints_of(place: LocalFolders) -> str:
    """Return the hints: the page's address, and how to reach a cluster in another folder."""
    hints = f"in a browser: {place.page}\n{HINTS}"
    if place.folder == default_folder():
        return hints
    local = f"`sailorctl local kill NODE --folder {place.folder}`"
    found = f"with SAILOR_SERVER=unix://{place.socket} (and {local}):"
    return hints.replace("in another terminal:", f"in another terminal, {found}", 1)


def live(cluster: LocalCluster, control: Control) -> None:
    """Show the cluster and serve `sailorctl local` until q or a signal; then print a summary."""
    poller = Poller(cluster.client)
    try:
        if is_usable():
            _show_screen(cluster, control, poller)
        else:
            click.echo(hints_of(cluster.place))
            _print_lines(cluster, control, poller)
    except Ended:
        click.echo(poller.summary())
        raise
    click.echo(poller.summary())


def _show_screen(cluster: LocalCluster, control: Control, poller: Poller) -> None:
    ui, look_at = Ui(can_kill=True), 0.0
    poller.seen.hints = tuple(hints_of(cluster.place).splitlines())
    with Terminal() as terminal:
        while True:
            draw(terminal, poller, ui)
            for key in terminal.wait(look_at - time.monotonic(), [control.listener]):
                ui, asked = take(terminal, poller, ui, key)
                if asked is not None and asked.kind == "quit":
                    return
                if asked is not None:
                    _carry_out(cluster, poller, asked)
                    look_at = 0.0
            for line in _tend(cluster, control, 0.0):
                poller.seen.say(line, time.time())
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_S
                for line in _look(cluster, poller):
                    poller.seen.say(line, time.time())


def _print_lines(cluster: LocalCluster, control: Control, poller: Poller) -> None:
    look_at, shown = 0.0, 0
    while True:
        for line in _tend(cluster, control, look_at - time.monotonic()):
            click.echo(line)
        if time.monotonic() < look_at:
            continue
        look_at = time.monotonic() + LOOK_S
        told = _look(cluster, poller)
        for event in [event for event in poller.seen.events if event["id"] > shown]:
            click.echo(printable(event_text(dict(event))))
        shown = poller.seen.last_event
        for line in (*told, *([poller.seen.outage] * bool(poller.seen.outage))):
            click.echo(line)
        sys.stdout.flush()


def _tend(cluster: LocalCluster, control: Control, wait_s: float) -> Iterable[str]:
    """Restart what was killed, serve one request within this time; return what was done."""
    done = control.serve(max(wait_s, 0.0))
    return (*cluster.look_after(), *((done,) if done else ()))


def _look(cluster: LocalCluster, poller: Poller) -> list[str]:
    """Ask sailord, and kill nodes whose notice has expired; return what was done."""
    try:
        poller.look()
    except ServerProblem:
        return []
    assert poller.seen.status is not None
    gone = cluster.play_cloud(poller.seen.status)
    return [f"the notice of {name} ran out: the node is preempted" for name in gone]


def _carry_out(cluster: LocalCluster, poller: Poller, asked: Asked) -> None:
    if asked.kind != "kill":
        poller.order(asked)
    elif asked.node in cluster.nodes:
        cluster.kill_node(asked.node)
        poller.seen.say(f"{asked.node} is killed, and its memory is lost", time.time())
