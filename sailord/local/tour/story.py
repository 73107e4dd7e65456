"""The sequence of ``make tour``: two jobs train while nodes leave and join, no step lost for good.

One job is a small LLaMA, the other the exact trainer, whose losses must be bit-equal. Both are
compared with reference runs without events.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from sailord.client import ServerProblem
from sailord.local.cluster import FIRST_NODES, ClusterError, LocalCluster
from sailord.local.tour.reference_run import ReferenceRun, largest_difference, start_reference_run
from sailord.local.tour.step_log import StepLog
from sailord.local.tour.tour_runner import TourEvent, TourRunner
from sailord.text.cluster_text import event_text
from sailord.text.node_text import nodes_text
from sailord.text.units import counted

TOLERANCE = 1e-4
"""Relative tolerance of the LLaMA's losses: another plan sums in another order."""
LINES_LAST = 12
NEWCOMERS = (("large", "zone-a"), ("large", "zone-b"))


@dataclass(frozen=True, slots=True)
class JobResult:
    """The events and losses of one job."""

    job: str
    events: tuple[TourEvent, ...]
    losses: dict[int, float]
    difference: float
    """The largest relative difference to the reference run's losses."""

    @property
    def final_step(self) -> int:
        return max(self.losses, default=0)

    @property
    def is_complete(self) -> bool:
        return all(event.steps_lost <= event.steps_allowed for event in self.events)

    def to_json(self) -> dict[str, Any]:
        return {
            "events": [event.to_json() for event in self.events],
            "final_step": self.final_step,
            "largest_relative_difference": self.difference,
        }


OFTEN = "\n[checkpoint]\nmemory_every = 1\n"
"""A snapshot at every step, so that a loss costs the same on every machine."""


@dataclass(eq=False)
class Tour:
    """Both jobs on one cluster."""

    cluster: LocalCluster
    begun_s: float = field(default_factory=time.monotonic)
    told: dict[str, JobResult] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        click.echo(f"{time.monotonic() - self.begun_s:6.1f} s  {text}")

    def run(self) -> None:
        """Run both jobs and compare their losses."""
        place = self.cluster.place
        self.say("sailord and eight nodes in three zones are starting")
        self.cluster.start()
        files = {"tale": "job.toml", "exact": "exact.toml"}
        jobs = {name: place.job(file) + OFTEN for name, file in files.items()}
        references = [start_reference_run(place.folder, *named) for named in jobs.items()]
        for name, job in jobs.items():
            self._tell(name, job)
        for node in list(self.cluster.nodes):
            self.cluster.kill_node(node)
        self._compare(references)

    def _tell(self, name: str, job: str) -> None:
        self._fill_up()
        self.cluster.client.ask("POST", "/v1/jobs", {"job": job, "id": name})
        runner = TourRunner(self.cluster, name, StepLog(self.cluster.place.folder, name), self.say)
        runner.begin()
        self.say(f"{name} trains on {len(self.cluster.nodes)} nodes")
        runner.give_notice()
        runner.lose_a_replica()
        runner.lose_the_only_copy()
        runner.add_machines(*NEWCOMERS)
        final = runner.end()
        self.say(f"{name} is cancelled after step {final}")
        losses = {step: loss for step, loss in runner.ledger.losses().items() if step <= final}
        self.told[name] = JobResult(name, tuple(runner.events), losses, float("inf"))

    def _fill_up(self) -> None:
        """Restore the eight nodes of the start."""
        spare = Counter(FIRST_NODES)
        for node in list(self.cluster.nodes.values()):
            if spare[node.kind, node.zone] > 0:
                spare[node.kind, node.zone] -= 1
            else:
                self.cluster.kill_node(node.name)
        for machine in spare.elements():
            self.cluster.add_node(*machine)
        wanted = set(self.cluster.nodes)
        self.cluster.wait("the nodes", lambda: self.cluster.ready_nodes() == wanted)

    def _compare(self, references: list[ReferenceRun]) -> None:
        self.say("waiting for the reference runs")
        for reference in references:
            told = self.told[reference.name]
            theirs = reference.losses(told.final_step)
            reference.end()
            difference = largest_difference(told.losses, theirs)
            self.told[told.job] = replace(told, difference=difference)

    # ---- results --------------------------------------------------------------------------------

    @property
    def is_equal(self) -> bool:
        """Whether both jobs' losses match the reference runs."""
        return self.told["exact"].difference == 0.0 and self.told["tale"].difference <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """Return the content of build/tour.json."""
        tale, exact = self.told["tale"], self.told["exact"]
        return {
            **tale.to_json(),
            "loss_equals_uninterrupted": self.is_equal,
            "exact": exact.to_json(),
            "seconds": round(time.monotonic() - self.begun_s, 1),
        }

    def sum_up(self) -> bool:
        """Print the results; return whether nothing was lost."""
        for told in self.told.values():
            click.echo(f"\n{told.job}, {told.final_step} steps, in four events:")
            for event in told.events:
                spent = ", ".join(
                    f"{name.replace('_', ' ')} {seconds:.2f}"
                    for name, seconds in event.phases.items()
                    if seconds is not None
                )
                click.echo(
                    f"  {event.kind:21} {event.lost + ',':13} {event.downtime_s:5.2f} s "
                    f"downtime (predicted {event.predicted_s or 0.0:.2f} s; {spent})"
                )
        exact, tale = self.told["exact"], self.told["tale"]
        same = "bit-equal to" if exact.difference == 0.0 else "NOT bit-equal to"
        click.echo(f"\nthe exact trainer's losses are {same} those of its reference run;")
        click.echo(
            f"the LLaMA's are within {tale.difference:.1e} of theirs "
            f"(loss {tale.losses[min(tale.losses)]:.3f} -> {tale.losses[tale.final_step]:.3f})"
        )
        return self.is_equal and tale.is_complete and exact.is_complete


def run_tour(cluster: LocalCluster, path: Path) -> bool:
    """Run the tour; return whether nothing was lost."""
    tour = Tour(cluster)
    try:
        tour.run()
    except (ClusterError, ServerProblem) as failure:
        click.echo(f"error: {failure}", err=True)
        _tell_last(cluster)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tour.to_json(), indent=1) + "\n", encoding="utf-8")
    is_whole = tour.sum_up()
    steps = sum(event.steps_lost for told in tour.told.values() for event in told.events)
    click.echo(verdict(is_whole=is_whole, steps_lost=steps), file=sys.stdout)
    return is_whole


def verdict(*, is_whole: bool, steps_lost: int) -> str:
    """Return the last line of the output; repeated steps are reported even where allowed."""
    if not is_whole:
        return "something was LOST"
    if steps_lost:
        return f"nothing was lost for good; {counted(steps_lost, 'step')} repeated"
    return "nothing was lost"


def _tell_last(cluster: LocalCluster) -> None:
    """Print the last events and the nodes, to help find the cause of a failure."""
    with contextlib.suppress(ServerProblem):
        nodes = cluster.client.ask("GET", "/v1/nodes")["nodes"]
        news = cluster.client.ask("GET", "/v1/events?follow=false")["events"]
        told = [event_text(one) for one in news[-LINES_LAST:]]
        failures = [f"{node['name']}: {node['failure']}" for node in nodes if node["failure"]]
        click.echo("\n".join([*told, nodes_text(nodes), *failures]), err=True)
