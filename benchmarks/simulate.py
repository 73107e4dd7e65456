"""How long the event estimator takes for plans of up to 16,384 GPUs.

    python -m benchmarks.simulate [--repeat N] [--profile]

Three kinds of plans: all pipelines one object, equal pipelines that are distinct objects (as
they come from a file), and pipelines that differ in GPU kinds, zones, boundaries and counts. Each
with TP 1 on machines of 8 and with TP over whole machines. ``cold`` is the first estimate of a
new estimator, its tables included; ``warm`` the median of those that follow; both leave out the
reading and checking of files. ``--profile`` shows where the time of the largest goes.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import pstats
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from sailord.text.table import table
from simulator.api import network_of
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.event_estimator import EventEstimator
from simulator.hardware.catalogue import load_catalogue
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.models.families import build_model
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage

BLOCKS = 126
LAYERS = BLOCKS + 2
GPUS_PER_MACHINE = 8
MICRO_BATCHES = 256
# (stages, pipelines) at TP 1; with TP over whole machines the same GPUs make fewer of both.
SHAPES = ((8, 8), (16, 16), (32, 32), (64, 64), (64, 156), (128, 128))
KINDS = ("A100-40", "V100-16", "H100-80")
ZONES = ("us-central1-a", "us-central1-b", "us-west1-b")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the event estimator.")
    parser.add_argument("--repeat", type=int, default=5, help="warm estimates of each plan")
    parser.add_argument("--profile", action="store_true", help="where the time of 4,096 GPUs goes")
    options = parser.parse_args(arguments)
    if options.profile:
        for flavour in FLAVOURS:
            profile(flavour, stages=64, pipelines=64, tp=1)
        return 0
    rows = [
        row(flavour, stages=stages, pipelines=max(pipelines // tp, 2), tp=tp, repeat=options.repeat)
        for tp in (1, GPUS_PER_MACHINE)
        for flavour in FLAVOURS
        for stages, pipelines in SHAPES
    ]
    print(table(("plan", "GPUs", "TP", "stages x pipelines", "cold ms", "warm ms"), rows))
    return 0


def row(flavour: str, *, stages: int, pipelines: int, tp: int, repeat: int) -> list[str]:
    """Time one plan."""
    judge = new_estimator()
    plan = FLAVOURS[flavour](stages, pipelines, tp)
    seconds = []
    for _ in range(1 + repeat):
        begin = time.perf_counter()
        judge.estimate(plan)
        seconds.append(time.perf_counter() - begin)
    cold, warm = seconds[0], statistics.median(seconds[1:])
    shape = f"{stages} x {pipelines}"
    times = (f"{1e3 * seconds:.1f}" for seconds in (cold, warm))
    return [flavour, f"{plan.device_count:,}", str(tp), shape, *times]


def profile(flavour: str, *, stages: int, pipelines: int, tp: int) -> None:
    """Print the functions in which a warm estimate spends its time."""
    judge, plan = new_estimator(), FLAVOURS[flavour](stages, pipelines, tp)
    judge.estimate(plan)
    profiler = cProfile.Profile()
    profiler.runcall(judge.estimate, plan)
    print(f"== {flavour}")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def new_estimator() -> EventEstimator:
    """An estimator with empty tables, for a large model on pools of every kind everywhere."""
    catalogue = load_catalogue()
    pools = tuple(
        Pool(zone, kind, f"{kind}x{GPUS_PER_MACHINE}", GPUS_PER_MACHINE, gpus=1 << 20,
             price_usd_per_gpu_hour=2.0, price_source="this benchmark")
        for zone in ZONES
        for kind in KINDS
    )  # fmt: skip
    cluster = Cluster(pools, catalogue)
    job = Job(
        name="benchmark",
        model=build_model("opt", layers=BLOCKS, hidden=4096, heads=32),
        global_batch=1,  # The plans are not checked here, so no one reads it.
        sequence=2048,
        max_tp=GPUS_PER_MACHINE,
    )
    network = network_of(cluster, MeasuredNetwork())
    costs = LayerCosts(job, profile=None, catalogue=catalogue, network=network)
    return EventEstimator(costs, network, PlaceFacts(cluster, MeasuredNetwork()))


# -- plans ------------------------------------------------------------------------------------


def shared(stages: int, pipelines: int, tp: int) -> Plan:
    """One pipeline object, many times."""
    place = Place(KINDS[0], f"{KINDS[0]}x{GPUS_PER_MACHINE}", ZONES[0])
    cuts = [LAYERS * s // stages for s in range(stages + 1)]
    row = tuple(Stage(ends, tp, (place,)) for ends in pairwise(cuts))
    return Plan(1, (Pipeline(MICRO_BATCHES, row),) * pipelines)


def equal(stages: int, pipelines: int, tp: int) -> Plan:
    """Equal pipelines, each with objects of its own."""
    plan = shared(stages, pipelines, tp)
    return Plan(1, tuple(copy.deepcopy(pipeline) for pipeline in plan.pipelines))


def different(stages: int, pipelines: int, tp: int) -> Plan:
    """Boundaries, GPU kinds and zones drawn per pipeline, counts that differ by one."""
    chance = random.Random(7)

    def pipeline(count: int) -> Pipeline:
        cuts = [0, *sorted(chance.sample(range(1, LAYERS), stages - 1)), LAYERS]
        zone, row = chance.choice(ZONES), []
        for ends in pairwise(cuts):
            if chance.random() < 0.1:
                zone = chance.choice(ZONES)
            kind = chance.choice(KINDS)
            row.append(Stage(ends, tp, (Place(kind, f"{kind}x{GPUS_PER_MACHINE}", zone),)))
        return Pipeline(count, tuple(row))

    return Plan(1, tuple(pipeline(MICRO_BATCHES + p % 2) for p in range(pipelines)))


FLAVOURS: dict[str, Callable[[int, int, int], Plan]] = {
    "one object": shared,
    "equal": equal,
    "all different": different,
}

if __name__ == "__main__":
    raise SystemExit(main())
