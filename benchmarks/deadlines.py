"""Deadlines in windows of a trace of spot GPUs, with on-demand GPUs beside them.

    python -m benchmarks.deadlines TRACE JOB CLUSTER [--hours H] [--on-demand MACHINES] [--seeds N]
        [--fixed]

CLUSTER has the trace's spot pools; on-demand machines of the first pool's type and zone are added.
Windows of H hours begin every H/2 hours. In each, jobs of 50, 75 and 90 % of what the on-demand
GPUs do in that time are played under all rules for deadlines, with several draws of the machines
that are lost. All of these deadlines can be guaranteed. One line for each share: the number of
windows, in how many of them each rule missed, and what `sailor` cost relative to the cheaper of the
other two rules (the mean, the worst, and the sum of dollars). With --fixed all rules write durable
checkpoints each 600 s; else `sailor` chooses their interval.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.policies import CachedSearch
from planner.move_policy.deadline import DEADLINE_RULES
from planner.problem.question import Question
from planner.replay.run_replay import Replay, replayed
from sailord.cli.planning.question import read_question
from sailord.cli.planning.replay import machines_taken
from sailord.cli.shared.described_job import JobFile
from sailord.text.table import table
from simulator.traces.play_types import ReconfigurationCosts
from simulator.traces.trace import Interval, Trace
from simulator.traces.trace_file import TraceChoice, load_trace

SHARES = (0.5, 0.75, 0.9)
OTHERS = DEADLINE_RULES[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("job", type=Path)
    parser.add_argument("cluster", type=Path)
    parser.add_argument("--hours", type=float, default=48.0)
    parser.add_argument("--on-demand", type=int, metavar="MACHINES")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--searches", type=int, default=16)
    parser.add_argument("--budget", type=int, default=40)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    asked = read_question(JobFile(args.job), args.cluster, None, "event", budget=args.budget)
    trace = load_trace(args.trace, asked.cluster, TraceChoice())
    asked, trace = with_on_demand(asked, trace, args.on_demand)
    search, rows = CachedSearch(), []
    begins = [
        n * args.hours * 1800
        for n in range(int((trace.end_s / 3600 - args.hours) / args.hours * 2) + 1)
    ]
    for share in SHARES:
        found: list[Replay] = []
        for begin_s in begins:
            window = window_of(trace, begin_s, args.hours * 3600)
            for seed in range(args.seeds):
                found.append(
                    play(asked, window, share, seed, search, args.searches, fixed=args.fixed)
                )
        rows.append([f"{share:.0%}", *summary_of(found)])
        print(*rows[-1], sep="  ", flush=True)
    header = ["of on demand", "windows", *(f"missed, {rule}" for rule in DEADLINE_RULES)]
    costs = ["mean", "worst", "sum"]
    print("", table([*header, *costs], rows), sep="\n")


def with_on_demand(asked: Question, trace: Trace, machines: int | None) -> tuple[Question, Trace]:
    """Add a pool of on-demand machines that are always there."""
    spot, cluster = asked.cluster.pools[0], asked.cluster
    count = spot.gpus // spot.gpus_per_machine if machines is None else machines
    gpus = count * spot.gpus_per_machine
    usd = cluster.catalogue.price_usd_per_gpu_hour(spot.machine, spot.zone)
    pool = replace(spot, gpus=gpus, spot=False, price_usd_per_gpu_hour=usd)
    cluster = replace(cluster, pools=(*cluster.pools, pool))
    intervals = [replace(each, gpus=(*each.gpus, gpus), nodes=()) for each in trace.intervals]
    return replace(asked, cluster=cluster), replace(trace, intervals=tuple(intervals))


def window_of(trace: Trace, begin_s: float, seconds: float) -> Trace:
    """Cut a window out of a trace; it begins at 0."""
    kept = [
        Interval(max(each.start_s - begin_s, 0.0), min(each.end_s - begin_s, seconds), each.gpus)
        for each in trace.intervals
        if each.start_s < begin_s + seconds and each.end_s > begin_s
    ]
    return replace(trace, intervals=tuple(kept))


def play(
    asked: Question,
    window: Trace,
    share: float,
    seed: int,
    search: CachedSearch,
    searches: int,
    *,
    fixed: bool,
) -> Replay:
    """Play a job that takes this share of the window on the on-demand GPUs alone."""
    alone = tuple(0 if pool.spot else pool.gpus for pool in asked.cluster.pools)
    pools = [
        replace(pool, gpus=count) for pool, count in zip(asked.cluster.pools, alone, strict=True)
    ]
    job = replace(asked.job, objective=replace(asked.job.objective, goal="throughput"))
    cluster = replace(asked.cluster, pools=tuple(pools))
    best = search(replace(asked, job=job, cluster=cluster)).estimate
    assert best is not None, "the on-demand machines are too few for the job"
    steps = int(share * window.end_s / best.iteration_s)
    return replayed(
        replace(asked, job=replace(asked.job, steps=steps)),
        window,
        ReconfigurationCosts(),
        taken=machines_taken(window, asked.cluster, seed),
        search=search,
        searches=searches,
        chooses_checkpoints=not fixed,
        deadline_s=window.end_s,
    )


def summary_of(found: list[Replay]) -> list[str]:
    """Summarise the windows of one share."""
    by_rule = {
        rule: [result.policy_results[number] for result in found]
        for number, rule in enumerate(DEADLINE_RULES)
    }
    missed = [sum(each.ended != "steps" for each in by_rule[rule]) for rule in DEADLINE_RULES]
    ours = [each.usd or 0.0 for each in by_rule["sailor"]]
    best = [
        min(each.usd or 0.0 for each in both)
        for both in zip(*(by_rule[rule] for rule in OTHERS), strict=True)
    ]
    ratios = [mine / other for mine, other in zip(ours, best, strict=True)]
    sums = [sum(each.usd or 0.0 for each in by_rule[rule]) for rule in DEADLINE_RULES]
    return [
        f"{len(found)}",
        *map(str, missed),
        f"{statistics.mean(ratios):.3f}",
        f"{max(ratios):.2f}",
        f"{sums[0] / min(sums[1:]):.3f}",
    ]


if __name__ == "__main__":
    main()
