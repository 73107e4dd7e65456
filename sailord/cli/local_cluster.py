"""The commands that start a cluster on this machine, and that do to it what a cloud would."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click

from sailord.client import ServerProblem
from sailord.local.cluster import Failed, LocalCluster
from sailord.local.control import Control, ask, listen
from sailord.local.paths import Place, usual_folder
from sailord.local.screen import Screen, hints_of
from sailord.local.signals import Ended, ended_by_signals, ignore
from sailord.local.tour.story import tell
from simulator.documents.problems import InputError, Problem

FAILED = 1
LOOK_S = 1.0


@click.command()
@click.option("--steps", type=click.IntRange(min=1), help="How long to train; else until Ctrl-C.")
@click.option("--worker", default="worker.control.worker_process", hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where it keeps its files.")
def up(steps: int | None, worker: str, folder: Path | None) -> None:
    """Start a cluster of emulated nodes on this machine, and train an example on it.

    Eight nodes in three zones, with GPUs of two kinds that are shares of this machine's cores;
    sailord with its store; and a small LLaMA that learns a text. Ctrl-C ends all of it.
    """
    raise SystemExit(_within(Place(folder or usual_folder(), worker), lambda c: _train(c, steps)))


@click.command()
@click.option("--worker", default="worker.control.worker_process", hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where it keeps its files.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("build/tour.json"),
    show_default=True,
    help="Where its figures go.",
)
def tour(worker: str, folder: Path | None, out: Path) -> None:
    """Tell the story without a person: machines go and come, and nothing is lost."""
    place = Place(folder or usual_folder(), worker)
    raise SystemExit(_within(place, lambda cluster: 0 if tell(cluster, out) else FAILED))


def _within(place: Place, act: Callable[[LocalCluster], int]) -> int:
    """Do something with a cluster, however that ends; return the exit code."""
    cluster = LocalCluster(place)
    is_ours = False
    with ended_by_signals():
        try:
            cluster.claim()
            is_ours = True
            return act(cluster)
        except Failed as failure:
            click.echo(f"error: {failure}", err=True)
            return FAILED
        except Ended as ended:
            return 0 if ended.number == signal.SIGINT else 128 + ended.number
        finally:
            ignore()
            if is_ours:
                click.echo("ending all of it")
            cluster.close()


def _train(cluster: LocalCluster, steps: int | None) -> int:
    click.echo("starting sailord and eight nodes; this takes a few seconds")
    cluster.start()
    text = cluster.place.job("job.toml")
    text = text if steps is None else text.replace("[training]", f"[training]\nsteps = {steps}")
    cluster.client.ask("POST", "/v1/jobs", {"job": text, "id": "tale"})
    _live(cluster, listen(cluster), Screen(sys.stdout.isatty(), hints_of(cluster.place)))


def _live(cluster: LocalCluster, control: Control, screen: Screen) -> NoReturn:
    """Show how things stand until told to end."""
    if not screen.is_terminal:
        click.echo(screen.hints)
    seen, look_at = 0, 0.0
    while True:
        done = control.serve(max(look_at - time.monotonic(), 0.0))
        for told in (*cluster.look_after(), *((done,) if done else ())):
            screen.say(told)
        if time.monotonic() < look_at:
            continue
        look_at = time.monotonic() + LOOK_S
        try:
            status = cluster.client.ask("GET", "/v1/status")
            nodes = cluster.client.ask("GET", "/v1/nodes")["nodes"]
            news = cluster.client.ask("GET", f"/v1/events?follow=false&after={seen}")["events"]
        except ServerProblem as problem:
            screen.say(str(problem))
            continue
        seen = news[-1]["id"] if news else seen
        screen.hear(news)
        for name in cluster.play_cloud(status):
            screen.say(f"the notice of {name} has run out: the cloud took it")
        screen.draw(status, nodes)


@click.group()
def local() -> None:
    """Do to the cluster of `sailorctl up` what a cloud would."""


@local.command()
@click.argument("machine", metavar="KIND@ZONE")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the cluster is.")
def add(machine: str, folder: Path | None) -> None:
    """Let a machine come: KIND is large or small, ZONE zone-a, zone-b or zone-c."""
    kind, at, zone = machine.partition("@")
    if not at:
        raise InputError(Problem(machine, "is no machine", "give it as large@zone-a"))
    _ask(folder, {"ask": "add", "kind": kind, "zone": zone})


@local.command("kill")
@click.argument("node")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the cluster is.")
def kill_(node: str, folder: Path | None) -> None:
    """Take a machine away without a word: kill all that runs on it."""
    _ask(folder, {"ask": "kill", "node": node})


def _ask(folder: Path | None, asked: dict[str, str]) -> None:
    try:
        click.echo(ask(Place(folder or usual_folder(), port=0).control, asked))
    except ServerProblem as problem:
        click.echo(f"error: {problem}", err=True)
        raise SystemExit(FAILED) from None
