"""Every policy of `sailorctl replay` on traces, as shares of the oracle.

    python -m benchmarks.policies --traces FOLDER [--case TRACE:JOB] [--seeds N] [--fixed]

FOLDER holds traces (`*.json`), `job-*.toml` and `cluster-*.toml`. Each trace is played on the first
cluster that has its pools, with every job or those of `--case`, for several costs of a move and
several draws of the machines that are lost. One line per case and cost: the mean share of each
policy in per cent of the oracle's samples, and the worst difference between `sailor` and the best
of the others in one draw. With `--fixed` sailor makes durable checkpoints every 600 s, as the
others do. Searches are shared by policies, costs and draws.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from planner.api import find_plan
from planner.problem.question import Answer, Question
from planner.replay.run_replay import POLICIES, replayed
from planner.search.search_cache import SearchCache
from sailord.cli.planning.question import read_question
from sailord.cli.planning.replay import machines_taken
from sailord.cli.shared.described_job import JobFile
from sailord.text.table import table
from simulator.documents.problems import InputError
from simulator.spec.job import Goal
from simulator.traces.play_types import ReconfigurationCosts
from simulator.traces.trace import GpuCounts, Trace
from simulator.traces.trace_file import TraceChoice, load_trace

COSTS = {"5/10": (5, 10, 120), "20/30": (20, 30, 120), "300": (300, 300, 300)}
"""Seconds of a planned move, of one after a loss, and of a restart."""
OTHERS = POLICIES[1:-1]


class CachedSearch:
    """Finds the plan of each availability once for each goal and limit of time."""

    def __init__(self) -> None:
        self.known: dict[tuple[GpuCounts, Goal, float | None], Answer] = {}

    def __call__(self, asked: Question) -> Answer:
        gpus = tuple(pool.gpus for pool in asked.cluster.pools)
        steps, left_s = asked.job.steps, asked.seconds_left
        step_s = None if left_s is None or steps is None else left_s / steps
        key = (gpus, asked.job.objective.goal, step_s)
        if key not in self.known:
            self.known[key] = find_plan(asked, SearchCache())
        return self.known[key]


def cases(folder: Path, chosen: list[str], budget: int) -> Iterator[tuple[str, Question, Trace]]:
    """Each trace with each job, on the first cluster that has the trace's pools."""
    pairs = [tuple(case.split(":")) for case in chosen]
    for path in sorted(folder.glob("*.json")):
        for job in sorted(folder.glob("job-*.toml")):
            name = job.stem.removeprefix("job-")
            if pairs and (path.stem, name) not in pairs:
                continue
            for cluster in sorted(folder.glob("cluster-*.toml")):
                try:
                    asked = read_question(JobFile(job), cluster, None, "event", budget=budget)
                    trace = load_trace(path, asked.cluster, TraceChoice())
                except InputError:
                    continue  # This cluster lacks a pool of the trace.
                yield f"{path.stem}, {name}", asked, trace
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--case", action="append", default=[], metavar="TRACE:JOB")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--searches", type=int, default=16)
    parser.add_argument("--budget", type=int, default=40)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows: list[list[str]] = []
    found: list[dict[str, object]] = []
    ours: dict[str, list[float]] = {}
    for name, asked, trace in cases(args.traces, args.case, args.budget):
        search = CachedSearch()
        for label, seconds in COSTS.items():
            shares: dict[str, list[float]] = {policy: [] for policy in POLICIES}
            ideal = []
            for seed in range(args.seeds):
                result = replayed(
                    asked,
                    trace,
                    ReconfigurationCosts(*seconds),
                    taken=machines_taken(trace, asked.cluster, seed),
                    search=search,
                    searches=args.searches,
                    chooses_checkpoints=not args.fixed,
                )
                most = result.policy_results[-1].samples
                if not most:
                    break
                ideal.append(100 * most / result.ideal_samples)
                for outcome in result.policy_results:
                    shares[outcome.policy].append(100 * outcome.samples / most)
            if not ideal:
                break  # The job never runs.
            worst = min(
                share - max(shares[policy][seed] for policy in OTHERS)
                for seed, share in enumerate(shares["sailor"])
            )
            ours.setdefault(label, []).append(statistics.mean(shares["sailor"]))
            means = {policy: statistics.mean(shares[policy]) for policy in POLICIES[:-1]}
            found.append({"case": name, "cost": label, "shares": shares, "oracle": ideal})
            rows.append(
                [name, label]
                + [f"{means[policy]:.1f}" for policy in POLICIES[:-1]]
                + [f"{worst:+.2f}", f"{statistics.mean(ideal):.1f}"]
            )
            print(*rows[-1], sep="  ", flush=True)
    header = ["trace, job", "move s", *POLICIES[:-1], "worst", "oracle of ideal"]
    print("", table(header, rows), sep="\n")
    for label, each in ours.items():
        print(f"sailor, moves of {label} s: {statistics.mean(each):.1f} on average")
    if args.json is not None:
        args.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
