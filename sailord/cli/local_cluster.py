"""The commands ``up`` and ``tour``: a cluster of emulated nodes on this machine."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import click

from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.options import FILE
from sailord.client import ServerProblem, default_folder
from sailord.local.cluster import ClusterError, LocalCluster
from sailord.local.control import listen
from sailord.local.paths import LocalFolders
from sailord.local.screen import live
from sailord.local.signals import Ended, ended_by_signals, ignore
from sailord.local.tour.story import run_tour
from sailord.local.zone_file import load_zones

WORKER = click.option("--worker", default="worker.control.worker_process", hidden=True)
FOLDER = click.option("--folder", type=FILE, help="Folder of the cluster's files.")


@click.command()
@click.option("--steps", type=click.IntRange(min=1), help="Steps to train; default: until Ctrl-C.")
@click.option(
    "--zones",
    "zone_file",
    type=FILE,
    help="TOML file of zones, with nodes and the delay and rate between them; needs root.",
)
@click.option("--idle", is_flag=True, help="Submit no job.")
@WORKER
@FOLDER
def up(
    steps: int | None, zone_file: Path | None, idle: bool, worker: str, folder: Path | None
) -> None:
    """Start an emulated cluster here and train on it.

    It has sailord with its store, eight nodes in three zones, and two kinds of emulated GPUs that
    share this machine's cores. It trains a small LLaMA until Ctrl-C, which removes everything.
    With --zones each node has a network namespace of its own, and packets between them are delayed
    as the file says (docs/formats.md).
    """
    zones = None if zone_file is None else load_zones(zone_file)
    cluster = LocalCluster(
        LocalFolders((folder or default_folder()).absolute(), worker), zones=zones
    )
    raise SystemExit(_run_cluster(cluster, lambda: _train(cluster, steps, idle=idle)))


@click.command()
@WORKER
@FOLDER
@click.option(
    "--out",
    type=FILE,
    default=Path("build/tour.json"),
    show_default=True,
    help="File for the measured figures.",
)
def tour(worker: str, folder: Path | None, out: Path) -> None:
    """Demonstrate recovery on an emulated cluster.

    Nodes leave and join while two jobs train; exits with 0 if no step is lost for good.
    """
    place = LocalFolders((folder or default_folder()).absolute(), worker)
    cluster = LocalCluster(place)
    raise SystemExit(_run_cluster(cluster, lambda: 0 if run_tour(cluster, out) else FAILED))


def _run_cluster(cluster: LocalCluster, act: Callable[[], int]) -> int:
    """Run ``act`` on a new cluster, and always end it; return the exit code."""
    is_ours = False
    with ended_by_signals():
        try:
            cluster.claim()
            is_ours = True
            return act()
        except (ClusterError, ServerProblem) as failure:
            click.echo(f"error: {failure}", err=True)
            if is_ours and (kept := cluster.place.keep_logs()) is not None:
                click.echo(f"the logs are kept in {kept}", err=True)
            return FAILED
        except Ended as ended:
            return 0 if ended.number == signal.SIGINT else 128 + ended.number
        finally:
            ignore()
            if is_ours:
                with contextlib.suppress(OSError):  # The terminal or the pipe may be closed.
                    click.echo("stopping the cluster")
            cluster.close()


def _train(cluster: LocalCluster, steps: int | None, *, idle: bool) -> int:
    nodes = "eight" if cluster.zones is None else len(cluster.machines)
    click.echo(f"starting sailord and {nodes} nodes; this takes a few seconds")
    cluster.start()
    if idle:
        live(cluster, listen(cluster))
        return 0
    text = cluster.place.job("job.toml", persist_every=20)
    text = text if steps is None else text.replace("[training]", f"[training]\nsteps = {steps}")
    cluster.client.ask("POST", "/v1/jobs", {"job": text, "id": "tale"})
    live(cluster, listen(cluster))
    return 0
