"""How much the controller takes for many nodes: ``python -m benchmarks.control [--nodes N]``.

The decisions of a cluster of N nodes, with no network: each node reports, a burst of notices
comes, and the planner answers. Prints one line of figures.
"""

from __future__ import annotations

import argparse
import resource
import time

from agents.protocol import Fence, Intent, JobId, JobRecord, NodeId, NodeRecord, Report
from sailord import invariants
from sailord.decide import decide
from sailord.model import (
    Command,
    Elected,
    Event,
    GenerationWritten,
    IntentGiven,
    PlanFound,
    Proposal,
    Reported,
    RequestPlan,
    State,
    Ticked,
    WriteGeneration,
)


class Bench:
    """A controller whose planner and store answer at once."""

    def __init__(self) -> None:
        self.state, self.now = State(), 0.0
        self.took_s: list[float] = []
        self.plans = 0

    def feed(self, event: Event) -> None:
        begun = time.perf_counter()
        before = self.state
        self.state, commands = decide(before, event)
        invariants.check(before, self.state, commands)
        self.took_s.append(time.perf_counter() - begun)
        for command in commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case RequestPlan():
                self.plans += 1
                plan = Proposal(f"plan {command.request}", command.nodes, True, "it fits", 1.0)
                self.feed(PlanFound(self.now, command.request, plan))
            case WriteGeneration():
                self.feed(GenerationWritten(self.now, command.record))
            case _:
                pass

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.feed(Ticked(self.now))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--notices", type=int, default=200)
    options = parser.parse_args()
    bench = Bench()
    ids = [NodeId(f"n{i:05}") for i in range(options.nodes)]
    nodes = tuple(NodeRecord(i, i, "z", "m", "A100-40", 8, "", "ready") for i in ids)
    job = JobRecord(JobId("j"), "queued")
    bench.feed(Elected(0.0, 1, nodes, (job,), ()))
    bench.wait(3.0)
    number = 0
    for step in (1, 2):
        for id_ in ids:
            number += 1
            report = Report(id_, number, Fence(1, 1), 1, "running", step)
            bench.feed(Reported(bench.now, report))
    plans = bench.plans
    for id_ in ids[: options.notices]:
        intent = Intent(f"notice {id_}", "preempt", id_, bench.now + 30)
        bench.feed(IntentGiven(bench.now, intent))
    bench.wait(2.0)
    ordered = sorted(bench.took_s)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{options.nodes} nodes, {len(ordered)} decisions: "
        f"p50 {_ms(ordered, 0.5)} ms, p99 {_ms(ordered, 0.99)} ms, "
        f"{options.notices} notices led to {bench.plans - plans} replan, {peak_mb:.0f} MB"
    )


def _ms(ordered: list[float], share: float) -> str:
    return f"{1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]:.2f}"


if __name__ == "__main__":
    main()
