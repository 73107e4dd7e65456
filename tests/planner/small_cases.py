"""Small random cases for planners, and all plans of each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError
from simulator.estimate.event_estimator import EventEstimator
from simulator.estimate.paper_formula import paper_estimate
from simulator.estimate.result import Estimate
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan
from simulator.layer_costs.profile import LayerSizes, Profile, Timing
from simulator.models.families import build_model
from simulator.network.curves import Curve
from simulator.network.network import MeasuredNetwork, Network
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Pipeline, Place, Plan, Stage

GPUS = ("A100-40", "V100-16", "T4")
ZONES = ("us-central1-a", "us-west1-b")
SEQUENCE = 64
SIZES = (1e3, 1e9)


@dataclass(frozen=True, slots=True, eq=False)
class Measured1(Measurements):
    """Measurements held in memory."""

    known: Profile | None = None

    def profile(self, name: str, *, catalogue: object) -> Profile:  # noqa: ARG002 - the interface has it
        assert self.known is not None
        return self.known


@dataclass(frozen=True, slots=True, eq=False)
class SmallCase:
    """A job on a small cluster with all measurements."""

    job: Job
    cluster: Cluster
    measurements: Measured1

    @property
    def profile(self) -> Profile:
        assert self.measurements.known is not None
        return self.measurements.known

    @property
    def judge(self) -> EventEstimator:
        """The event estimator."""
        found = estimator(
            "event", job=self.job, cluster=self.cluster, measurements=self.measurements
        )
        assert isinstance(found, EventEstimator)
        return found

    def paper(self, plan: Plan) -> Estimate | None:
        """The paper estimator's result; ``None`` where it rejects the plan."""
        catalogue = self.cluster.catalogue
        facts = PlaceFacts(self.cluster, self.measurements.network)
        try:
            return paper_estimate(
                plan,
                job=self.job,
                profile=self.profile,
                network=Network(catalogue, self.measurements.network),
                usd_per_hour=facts.usd_per_hour,
                capacity_bytes=lambda place: float(catalogue.gpu(place.gpu).memory_bytes),
                gpus_per_node=facts.gpus_per_machine,
            ).estimate(plan)
        except InputError:
            return None


def random_case(
    rng: random.Random,
    *,
    gpus_max: int = 5,
    layers_max: int = 6,
    batch: int = 4,
    goal: str = "throughput",
    kinds_max: int = 3,
) -> SmallCase:
    """Up to ``gpus_max`` GPUs of up to three kinds in up to two zones."""
    layers = rng.randint(2, layers_max)
    model = build_model(
        "gpt2", layers=layers - 2 or 1, hidden=16, heads=4, vocab=64, sequence=SEQUENCE
    )
    layers = len(model.layers)
    catalogue = load_catalogue()
    kinds = rng.sample(GPUS, rng.randint(1, kinds_max))
    pools: list[Pool] = []
    left = rng.randint(1, gpus_max)
    places = [(gpu, zone) for gpu in kinds for zone in ZONES]
    rng.shuffle(places)
    while left and places:
        gpu, zone = places.pop()
        count = rng.randint(1, left)
        left -= count
        size = rng.choice([2, 4])
        price = rng.choice([1.0, 2.0, 3.5])
        pools.append(
            Pool(zone, gpu, f"{gpu}x{size}", size, count, price_usd_per_gpu_hour=price,
                 price_source="cluster file")
        )  # fmt: skip
    cluster = Cluster(tuple(pools), catalogue)
    job = Job(
        "small",
        model,
        global_batch=batch,
        sequence=SEQUENCE,
        profile="small",
        precision="fp32",
        optimizer="adam",
        max_tp=4,
        objective=Objective(goal=goal),  # type: ignore[arg-type]  # a literal
    )
    profile = _random_profile(rng, layers)
    return SmallCase(job, cluster, Measured1(network=_random_network(rng), known=profile))


def _random_profile(rng: random.Random, layers: int) -> Profile:
    timings = {}
    for gpu in GPUS:
        speed = rng.uniform(0.5, 3)
        row = np.array([speed * rng.uniform(0.5, 1.5) for _ in range(layers)])
        for tp in (1, 2, 4):
            for b in (1, 2, 4):
                seconds = row * b ** rng.uniform(0.7, 1) / tp ** rng.uniform(0.5, 1.05)
                timings[gpu, tp, b] = Timing(seconds / 3, 2 * seconds / 3, rng.uniform(0, 0.2))
    scale = rng.choice([1e6, 3e8, 1e9])
    whole = [rng.randint(1, 10) * scale / 10 for _ in range(layers)]
    kept = [rng.randint(1, 10) * scale / 10 for _ in range(layers)]
    sizes = {
        tp: LayerSizes(
            tuple(int(n / tp) for n in whole),
            tuple([int(1e6)] * layers),
            tuple(int(n / tp) for n in kept),
        )
        for tp in (1, 2, 4)
    }
    names = tuple(f"layer-{index}" for index in range(layers))
    return Profile(
        "small",
        SEQUENCE,
        "fp32",
        names,
        timings,
        sizes,
        {tp: int(sum(whole) / tp) for tp in (1, 2, 4)},
        {},
    )


def _random_network(rng: random.Random) -> MeasuredNetwork:
    ends = [(zone, gpu) for zone in ZONES for gpu in GPUS]
    raw = {}
    for one, other in itertools.product(ends, repeat=2):
        base = 10 ** rng.uniform(-2.5, 0.5)
        raw[one, other] = {
            (n, m): Curve(
                min(n, m), SIZES, (1.0, 2.0),
                (rng.uniform(-1e-4, 1e-4), rng.uniform(0, base / 20), base * min(n, m)),
            )
            for n in (1, 2, 4)
            for m in (1, 2, 4)
        }  # fmt: skip
    egress = {(a, b): 0.0 if a == b else rng.choice([1e-9, 1e-7]) for a in ZONES for b in ZONES}
    return MeasuredNetwork(raw_between=raw, egress_usd_per_byte=egress)


def every_common_plan(case: SmallCase, sizes: tuple[int, ...] = (1, 2, 4)) -> Iterator[Plan]:
    """All plans whose pipelines share their boundaries, in every order of the pipelines."""
    layers = len(case.job.model.layers)
    places = [Place(pool.gpu, pool.machine, pool.zone) for pool in case.cluster.pools]
    gpus = sum(pool.gpus for pool in case.cluster.pools)
    options = [(place, tp) for place in places for tp in (1, 2, 4)]
    for b in sizes:
        total = case.job.global_batch // b
        if case.job.global_batch % b:
            continue
        for replicas in range(1, min(total, gpus) + 1):
            for stages in range(1, min(layers, gpus // replicas) + 1):
                for cells in _fills(case, options, replicas * stages):
                    for inner in itertools.combinations(range(1, layers), stages - 1):
                        cuts = (0, *inner, layers)
                        for counts in _counts(total, replicas):
                            yield Plan(
                                b,
                                tuple(
                                    Pipeline(
                                        counts[d],
                                        tuple(
                                            Stage(
                                                (cuts[s], cuts[s + 1]),
                                                cells[d * stages + s][1],
                                                (cells[d * stages + s][0],),
                                            )
                                            for s in range(stages)
                                        ),
                                    )
                                    for d in range(replicas)
                                ),
                            )


def _fills(
    case: SmallCase, options: list[tuple[Place, int]], cells: int
) -> Iterator[tuple[tuple[Place, int], ...]]:
    left = {(pool.gpu, pool.machine, pool.zone): pool.gpus for pool in case.cluster.pools}
    chosen: list[tuple[Place, int]] = []

    def walk() -> Iterator[tuple[tuple[Place, int], ...]]:
        if len(chosen) == cells:
            yield tuple(chosen)
            return
        for place, tp in options:
            key = (place.gpu, place.machine, place.zone)
            if left[key] >= tp:
                left[key] -= tp
                chosen.append((place, tp))
                yield from walk()
                chosen.pop()
                left[key] += tp

    return walk()


def _counts(total: int, replicas: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide micro batches over pipelines, at least one each."""
    for inner in itertools.combinations(range(1, total), replicas - 1):
        bounds = (0, *inner, total)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


def is_possible(case: SmallCase, plan: Plan) -> bool:
    return not check_plan(plan, case.job, case.cluster)
