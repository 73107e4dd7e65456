"""Small random worlds for tests: a job, a cluster, measurements and plans, all from one seed.

The worlds are unusual on purpose: pipelines differ in everything, links have any speed, and only
some GPU kinds have a profile. But every plan can run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.event_estimator import EventEstimator
from simulator.hardware.catalogue import Catalogue, load_catalogue
from simulator.hardware.types import DistanceLimits, Link
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.layer_costs.profile import LayerSizes, Profile, Timing
from simulator.models.families import build_model
from simulator.models.layers import Model, Recompute
from simulator.network.curves import Curve, curve_from_bandwidths, make_consistent
from simulator.network.network import MeasuredNetwork, Network
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Schedule, Stage, with_sizes

GPUS = ("V100-16", "A100-40", "GH-96", "RTX-3090", "T4")
ZONES = ("us-central1-a", "us-central1-b", "us-east1-b", "europe-west4-a")
GPUS_PER_MACHINE = 4
SEQUENCE = 128


@dataclass(frozen=True, slots=True)
class World:
    """One job on one cluster, with its estimator."""

    job: Job
    cluster: Cluster
    measured: MeasuredNetwork
    network: Network
    profile: Profile | None
    estimator: EventEstimator = field(repr=False)

    @property
    def costs(self) -> LayerCosts:
        return self.estimator.costs


def world_of(
    job: Job,
    *,
    cluster: Cluster | None = None,
    measured: MeasuredNetwork | None = None,
    profile: Profile | None = None,
    zone_caps: dict[tuple[str, str], float] | None = None,
) -> World:
    """Build a world from its parts."""
    cluster = cluster or every_pool()
    measured = measured or MeasuredNetwork()
    network = Network(
        cluster.catalogue,
        measured,
        dict(cluster.zone_regions),
        zone_caps
        if zone_caps is not None
        else {(link.from_zone, link.to_zone): link.bytes_per_s for link in cluster.zone_links},
    )
    costs = LayerCosts(job, profile=profile, catalogue=cluster.catalogue, network=network)
    estimator = EventEstimator(costs, network, PlaceFacts(cluster, measured))
    return World(job, cluster, measured, network, profile, estimator)


@cache
def small_model(*, layers: int = 4, tied: bool = False, family: str = "gpt2") -> Model:
    """Build a model of a few hundred thousand parameters."""
    return build_model(
        family, layers=layers, hidden=64, heads=8, vocab=512, sequence=SEQUENCE, tied=tied
    )


@cache
def every_pool(catalogue: Catalogue | None = None) -> Cluster:
    """Build a cluster with each of ``GPUS`` in each of ``ZONES``, in machines of four."""
    return Cluster(
        pools=tuple(
            Pool(
                zone=zone,
                gpu=gpu,
                machine=f"{gpu}x{GPUS_PER_MACHINE}",
                gpus_per_machine=GPUS_PER_MACHINE,
                gpus=4096,
                price_usd_per_gpu_hour=1.0 + 0.25 * GPUS.index(gpu) + 0.1 * ZONES.index(zone),
                price_source="cluster file",
            )
            for zone in ZONES
            for gpu in GPUS
        ),
        catalogue=catalogue or load_catalogue(),
    )


def with_links(
    catalogue: Catalogue,
    link: Callable[[Link], Link],
    reach: Callable[[DistanceLimits], DistanceLimits],
) -> Catalogue:
    """The catalogue with other links: inside machines and between them."""
    return replace(
        catalogue,
        machines={
            name: replace(m, intra_link=link(m.intra_link), nic=link(m.nic))
            for name, m in catalogue.machines.items()
        },
        distance_limits={name: reach(each) for name, each in catalogue.distance_limits.items()},
    )


def place(gpu: str = "V100-16", zone: str = "us-central1-a", *, node: str | None = None) -> Place:
    return Place(gpu, f"{gpu}x{GPUS_PER_MACHINE}", zone, node)


def stage(
    first: int,
    end: int,
    *places: Place,
    tp: int = 1,
    recompute: Recompute | int = "none",
    split: tuple[int, ...] | None = None,
) -> Stage:
    return Stage((first, end), tp, places, recompute, split or (1,) * len(places))


# Random parts ------------------------------------------------------------------------------------


def random_world(rng: random.Random, *, over_tcp: bool = False) -> World:
    """Draw a job with its cluster and measurements."""
    model = small_model(
        layers=rng.randint(1, 7),
        tied=rng.random() < 0.5,
        family=rng.choice(["gpt2", "opt", "llama"]),
    )
    job = Job(
        name="random",
        model=model,
        global_batch=64,
        sequence=rng.choice([SEQUENCE, SEQUENCE // 2]),
        precision=rng.choice(["fp32", "bf16", "fp16"]),
        optimizer=rng.choice(["adam", "sgd"]),
        max_tp=4,
        zero=rng.choice([0, 1]),
        gradient_sync=rng.choice(["overlap", "serial"]),
        flash_attention=rng.random() < 0.5,
        runtime=rng.choice(["sailor", "sailor", "megatron-deepspeed"]),
    )
    caps = {
        (a, b): 10 ** rng.uniform(5, 9)
        for a in ZONES
        for b in ZONES
        if a != b and rng.random() < 0.2
    }
    return world_of(
        job,
        measured=random_network(rng, over_tcp=over_tcp)
        if rng.random() < 0.6
        else MeasuredNetwork(),
        profile=random_profile(rng, job) if rng.random() < 0.5 else None,
        zone_caps=caps,
    )


def random_curve(rng: random.Random, flows: int, *, is_tcp: bool = False) -> Curve:
    sizes = (1e3, 1e4, 1e5, 1e6)
    rates = tuple(10 ** rng.uniform(6, 10) for _ in sizes)
    return curve_from_bandwidths(flows, sizes_bytes=sizes, bytes_per_s=rates, is_tcp=is_tcp)


def random_network(rng: random.Random, *, over_tcp: bool = False) -> MeasuredNetwork:
    """Draw curves for about half of the pairs of places, and within some machines."""
    ends = [(zone, gpu) for zone in ZONES for gpu in GPUS]
    between = {}
    for one in ends:
        for other in ends:
            if rng.random() < 0.5:
                counts = sorted(rng.sample([1, 2, 4, 8], rng.randint(1, 3)))
                curves = {n: random_curve(rng, n, is_tcp=over_tcp) for n in counts}
                between[one, other] = make_consistent(curves)
    within = {
        gpu: {n: random_curve(rng, n // 2) for n in (2, 4)} for gpu in GPUS if rng.random() < 0.5
    }
    return MeasuredNetwork(between=between, within=within)


def random_profile(rng: random.Random, job: Job) -> Profile:
    """Draw times of some GPU kinds, TP degrees and micro batches; they grow with the batch."""
    layers = len(job.model.layers)
    timings = {}
    for gpu in rng.sample(GPUS, rng.randint(1, 3)):
        for tp in sorted(rng.sample([1, 2, 4], rng.randint(1, 3))):
            row = np.array([rng.uniform(1e-4, 2e-3) for _ in range(layers)])
            for batch in sorted(rng.sample([1, 2, 4, 8], rng.randint(1, 3))):
                grown = row * batch ** rng.uniform(0.7, 1.0)
                row = np.maximum(row, grown)
                timings[gpu, tp, batch] = Timing(row, 2 * row, rng.uniform(1e-4, 1e-2))
    with_sizes = rng.random() < 0.7
    sizes = {
        tp: LayerSizes(
            tuple(layer.parameters(tp) for layer in job.model.layers),
            tuple(layer.output_elements(job.sequence) for layer in job.model.layers),
            tuple(rng.randint(1000, 90000) for _ in range(layers)),
        )
        for tp in (1, 2, 4)
    }
    return Profile(
        name="random",
        sequence=rng.choice([job.sequence, 2 * job.sequence]),
        precision=rng.choice([job.precision, "fp32"]),
        layer_names=tuple(layer.name for layer in job.model.layers),
        timings=timings,
        sizes=sizes if with_sizes else {},
        optimizer_parameters={tp: job.model.stage_parameters(0, layers, tp=tp) for tp in (1, 2, 4)},
        config={},
    )


def even_profile(
    job: Job, seconds: dict[str, float], *, micro_batches: tuple[int, ...] = (1,)
) -> Profile:
    """Build a profile at TP 1: equal seconds per sample and layer, backward twice as long."""
    layers = len(job.model.layers)
    return Profile(
        name="even",
        sequence=job.sequence,
        precision=job.precision,
        layer_names=tuple(layer.name for layer in job.model.layers),
        timings={
            (gpu, 1, batch): Timing(
                np.full(layers, batch * each), np.full(layers, 2 * batch * each), 1e-3
            )
            for gpu, each in seconds.items()
            for batch in micro_batches
        },
        sizes={},
        optimizer_parameters={1: job.model.parameters},
        config={},
    )


def random_place(rng: random.Random, *, zones: tuple[str, ...], gpus: tuple[str, ...]) -> Place:
    return place(rng.choice(gpus), rng.choice(zones))


def random_cuts(rng: random.Random, layers: int, stages: int) -> list[tuple[int, int]]:
    """Draw the layer ranges of consecutive stages."""
    cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    return list(itertools.pairwise(cuts))


def random_plan(
    rng: random.Random,
    world: World,
    *,
    schedules: tuple[Schedule, ...] = ("1f1b", "1f1b", "1f1b", "gpipe", "interleaved"),
    splits: bool = True,
    most_pipelines: int = 4,
    most_micro_batches: int = 12,
) -> Plan:
    """Draw a plan; ``splits`` allows stages over several device groups."""
    layers = len(world.job.model.layers)
    schedule = rng.choice(schedules)
    size = rng.choice([1, 2, 4])
    zones = tuple(rng.sample(ZONES, rng.randint(1, len(ZONES))))
    gpus = tuple(rng.sample(GPUS, rng.randint(1, 3)))
    virtual = 1
    if schedule == "interleaved":
        virtual = rng.choice([v for v in (1, 2, 3) if 2 * v <= layers])
    pipelines: list[Pipeline] = []
    for _ in range(rng.randint(1, most_pipelines)):
        if pipelines and rng.random() < 0.3:
            pipelines.append(rng.choice(pipelines))
            continue
        groups = rng.randint(2 if virtual > 1 else 1, min(layers // virtual, 5))
        stages = _random_stages(
            rng,
            layers,
            groups,
            virtual,
            size if splits and schedule != "interleaved" else 1,
            zones,
            gpus,
        )
        count = rng.randint(1, most_micro_batches)
        if schedule == "interleaved":
            count = groups * rng.randint(1, 4)
        pipelines.append(Pipeline(count, stages))
    return Plan(size, tuple(pipelines), schedule, virtual)


def _random_stages(
    rng: random.Random,
    layers: int,
    groups: int,
    virtual: int,
    most_places: int,
    zones: tuple[str, ...],
    gpus: tuple[str, ...],
) -> tuple[Stage, ...]:
    owners: list[tuple[tuple[Place, ...], int, tuple[int, ...]]] = []
    for _ in range(groups):
        split = (1,)
        if most_places > 1 and rng.random() < 0.25:
            split = rng.choice([(1, 1), (3, 1) if most_places == 4 else (1, 1)])
        places = tuple(random_place(rng, zones=zones, gpus=gpus) for _ in split)
        owners.append((places, rng.choice([1, 2, 4]), split))
    stages = []
    for s, cut in enumerate(random_cuts(rng, layers, groups * virtual)):
        places, tp, split = owners[s % groups]
        recompute: Recompute = rng.choice(["none", "none", "full"])
        stages.append(Stage(cut, tp, places, recompute, split))
    return tuple(stages)


def recomputed_layers(world: World, stage: Stage) -> list[int]:
    """The layers of a stage that run forward a second time: blocks alone."""
    layers = list(range(*stage.layers))
    if stage.recompute == "none":
        return []
    some = layers if stage.recompute == "full" else layers[: stage.recompute]
    return [index for index in some if world.job.model.layers[index].kind == "block"]


def with_own_sizes(rng: random.Random, plan: Plan) -> Plan:
    """Let each pipeline have a micro batch size that its shares divide."""
    sizes = []
    for pipeline in plan.pipelines:
        whole = max(sum(stage.split) for stage in pipeline.stages)
        sizes.append(rng.choice([size for size in (1, 2, 4) if size % whole == 0]))
    return with_sizes(plan, sizes)


def with_shares(rng: random.Random, plan: Plan) -> Plan:
    """Let about a third of a plan's stages recompute some of their first layers."""

    def shared(one: Stage) -> Stage:
        layers = one.layers[1] - one.layers[0]
        if layers == 1 or rng.random() < 2 / 3:
            return one
        return replace(one, recompute=rng.randint(1, layers - 1))

    pipelines = (replace(p, stages=tuple(map(shared, p.stages))) for p in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def placed(plan: Plan) -> Plan:
    """Return the plan with a node named for every device group, up to four GPUs on each."""
    free: dict[Place, tuple[int, int]] = {}
    pipelines = []
    for pipeline in plan.pipelines:
        stages: list[Stage] = []
        for s, one in enumerate(pipeline.stages):
            if s >= plan.group_count(pipeline):
                stages.append(replace(one, places=stages[s % plan.group_count(pipeline)].places))
                continue
            named = []
            for where in one.places:
                number, left = free.get(where, (0, GPUS_PER_MACHINE))
                if one.tp > left:
                    number, left = number + 1, GPUS_PER_MACHINE
                free[where] = (number, left - one.tp)
                name = f"{where.zone}/{where.gpu}/{number:04d}"
                named.append(replace(where, node=name))
            stages.append(replace(one, places=tuple(named)))
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


def world_and_plan(seed: str) -> tuple[random.Random, World, Plan]:
    """Return the world and plan of a named case, and the generator that drew them."""
    rng = random.Random(seed)
    world = random_world(rng)
    return rng, world, random_plan(rng, world)


def cases(name: str, examples: int) -> list[str]:
    """Return the names of this many cases."""
    return [f"{name} {number}" for number in range(examples)]
