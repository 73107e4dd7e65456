"""Whether a plan suits its job and its cluster: everything that does not, and what would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from simulator.cluster import Cluster, Pool
from simulator.errors import InputError, Problem, Problems, nearest
from simulator.job import Job
from simulator.job_model import unfit_tp
from simulator.plan import Pipeline, Place, Plan, Stage
from simulator.plan_file import complete_plan

PlaceKey = tuple[str, str, str]
"""GPU kind, machine type and zone: what a pool offers and a device group takes."""


def check_plan(
    plan: Plan, job: Job, cluster: Cluster, *, place: str = "plan"
) -> tuple[Problem, ...]:
    """Say all that keeps this plan from running this job on this cluster.

    The shape of the plan is sound already (``read_plan`` saw to it). ``place`` names the plan in
    what is reported, usually its file.
    """
    problems = Problems()
    plan = complete_plan(plan, cluster)
    _check_batch(plan, job, place, problems)
    _check_layers(plan, job, place, problems)
    offers = _offers(cluster)
    unfit = _Repeated()
    for number, pipeline in enumerate(plan.pipelines):
        where = f"{place}: pipelines[{number}]"
        _check_interleaving(plan, pipeline, where, problems)
        for index, stage in enumerate(pipeline.stages):
            at = f"{where}.stages[{index}]"
            tp = stage.tp
            question = partial(_recompute_problem, stage, job)
            unfit.judge(("recompute", stage.recompute), at, question)
            question = partial(_split_problem, stage.split, plan.micro_batch_size)
            unfit.judge(("split", stage.split), at, question)
            unfit.judge(("tp", tp), at, partial(tp_problem, tp, job))
            for there, taken in _named_places(stage, at):
                question = partial(_place_fault, taken, tp, cluster, offers)
                unfit.judge((taken, tp), there, question)
    unfit.report(problems)
    _check_supply(plan, cluster, offers, place, problems)
    _check_devices(plan, place, problems)
    return tuple(problems.found)


def _check_batch(plan: Plan, job: Job, place: str, problems: Problems) -> None:
    """A plan meets the global batch exactly, in whole micro batches."""
    size, batch = plan.micro_batch_size, job.global_batch
    if job.micro_batches is not None and size not in job.micro_batches:
        sizes = ", ".join(map(str, job.micro_batches))
        cure = f"give one of {sizes}, or add it to training.micro_batches in the job"
        problems.add(f"{place}: micro_batch_size", f"is {size}, which the job rules out", cure)
    if batch % size:
        divisors = [str(n) for n in range(1, min(batch, 4096) + 1) if batch % n == 0]
        shown = ", ".join(divisors[:10]) + (", ..." if len(divisors) > 10 else "")
        what = f"{size} does not divide the global batch of {batch}"
        problems.add(f"{place}: micro_batch_size", what, f"those that do are {shown}")
        return
    counts = [pipeline.micro_batches for pipeline in plan.pipelines]
    given, wanted = sum(counts), batch // size
    if given == wanted:
        return
    difference = abs(given - wanted)
    what = (
        f"{_written_sum(counts)} micro batches of {size} make {given * size} samples, "
        f"{difference * size} too {'many' if given > wanted else 'few'} "
        f"for the global batch of {batch}"
    )
    if wanted < len(counts):
        cure = f"{wanted} micro batches feed at most {wanted} of the {len(counts)} pipelines"
    else:
        cure = f"give micro_batches {_written_list(share_out(wanted, counts))}"
    problems.add(f"{place}: pipelines", what, cure)


def share_out(total: int, weights: list[int]) -> list[int]:
    """Divide a total in the proportion of the weights, at least one each, ties to the first."""
    assert total >= len(weights), (total, weights)
    weight = sum(weights)
    shares = [total * part // weight for part in weights]
    rests = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % weight), i))
    for index in rests[: total - sum(shares)]:
        shares[index] += 1
    owed = shares.count(0)
    shares = [max(share, 1) for share in shares]
    for index in sorted(range(len(shares)), key=lambda i: (-shares[i], i)):
        given = min(owed, shares[index] - 1)
        shares[index] -= given
        owed -= given
    return shares


def _written_sum(counts: list[int]) -> str:
    if len(counts) == 1:
        return str(counts[0])
    if len(counts) <= 8:
        return f"{' + '.join(map(str, counts))} = {sum(counts)}"
    return f"{sum(counts)} (over {len(counts)} pipelines)"


def _written_list(counts: list[int]) -> str:
    if len(counts) <= 8:
        return ", ".join(map(str, counts))
    runs = Counter(counts)
    return ", ".join(f"{count} in {times} pipelines" for count, times in sorted(runs.items()))


def _check_layers(plan: Plan, job: Job, place: str, problems: Problems) -> None:
    """The stages of every pipeline hold each layer once, in order; equal ones are told once."""
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        alike.setdefault(tuple(stage.layers for stage in pipeline.stages), []).append(number)
    count = len(job.model.layers)
    for ranges, numbers in alike.items():
        also = _also(len(numbers) - 1, "pipeline")
        for index, what, cure in _layer_faults(ranges, count, job.model.name):
            at = f"{place}: pipelines[{numbers[0]}].stages[{index}].layers"
            cover = f"the layers of a pipeline must cover [0, {count}) without gap or overlap"
            problems.add(at, what + also, f"{cure}; {cover}")


def _layer_faults(
    ranges: tuple[tuple[int, int], ...], count: int, model: str
) -> Iterator[tuple[int, str, str]]:
    """Find the stages whose range is wrong: the index, what is wrong, and the cure."""
    expected = 0
    for index, (first, end) in enumerate(ranges):
        shown = f"[{first}, {end})"
        if first >= count:
            yield index, f"{shown} lies behind the last layer of {model}", "leave the stage out"
            continue
        if first > expected:
            before = "before the first stage" if index == 0 else "between this stage and the last"
            missing = _layer_words(expected, first)
            yield index, f"{shown} leaves out {missing} {before}", f"start at {expected}"
        elif first < expected:
            twice = _layer_words(first, min(end, expected))
            cure = f"start at {expected}" if expected < end else "leave the stage out"
            yield index, f"{shown} repeats {twice}", cure
        if end > count:
            yield index, f"{shown} ends behind the last layer of {model}", f"end at {count}"
        expected = max(expected, min(end, count))
    if expected < count:
        first, end = ranges[-1]
        missing = _layer_words(expected, count)
        yield (
            len(ranges) - 1,
            f"[{first}, {end}) leaves out {missing} at the end",
            f"end at {count}",
        )


def _also(more: int, what: str) -> str:
    return f" (and so in {more} more {what}{'s' if more > 1 else ''})" if more else ""


def _layer_words(first: int, end: int) -> str:
    return f"layer {first}" if end - first == 1 else f"layers {first} to {end - 1}"


@dataclass(slots=True)
class _Repeated:
    """Faults that equal stages share: judged once, and told once with the number of repeats.

    A large plan has thousands of stages and a handful of kinds of them.
    """

    faults: dict[Hashable, Problem | None] = field(default_factory=dict)
    places: dict[Hashable, list[str]] = field(default_factory=dict)

    def judge(self, kind: Hashable, at: str, question: Callable[[], Problem | None]) -> None:
        if kind not in self.faults:
            self.faults[kind] = question()
        if self.faults[kind] is not None:
            self.places.setdefault(kind, []).append(at)

    def report(self, problems: Problems) -> None:
        for kind, places in self.places.items():
            fault = self.faults[kind]
            assert fault is not None, "only faults have places"
            more = len(places) - 1
            also = _also(more, "stage")
            problems.add(f"{places[0]}.{fault.place}", fault.what + also, fault.cure)


def tp_problem(tp: int, job: Job) -> Problem | None:
    """Say why the job's model may not be cut into ``tp`` pieces."""
    fault = unfit_tp(job.model, tp)
    if fault is not None:
        return fault
    if tp > job.max_tp:
        what = f"{tp} is more than the job's largest TP degree of {job.max_tp}"
        return Problem("tp", what, f"set training.max_tp = {tp} in the job, or lower tp")
    return None


def _recompute_problem(stage: Stage, job: Job) -> Problem | None:
    # Recomputing more than the job asks for is slower but right, so only the opposite is told.
    if job.recompute != "full" or stage.recompute == "full":
        return None
    cure = 'set "recompute": "full", or training.recompute = "auto" in the job'
    return Problem("recompute", 'is "none" where the job wants "full"', cure)


def _split_problem(split: tuple[int, ...], micro_batch_size: int) -> Problem | None:
    total = sum(split)
    if all(micro_batch_size * share % total == 0 for share in split):
        return None
    shares = ", ".join(map(str, split))
    what = f"[{shares}] does not divide micro batches of {micro_batch_size} into whole samples"
    return Problem("split", what, "the shares' sum must divide the micro batch times each share")


def _check_interleaving(plan: Plan, pipeline: Pipeline, where: str, problems: Problems) -> None:
    """With several chunks per device group, group g holds the stages g, g + D, g + 2D, ..."""
    chunks = plan.virtual_stages
    if plan.schedule != "interleaved":
        return
    if len(pipeline.stages) % chunks:
        what = f"has {len(pipeline.stages)} stages, no multiple of {chunks} virtual stages"
        problems.add(f"{where}.stages", what, "give every device group as many chunks as the rest")
        return
    groups = plan.group_count(pipeline)
    if pipeline.micro_batches % groups:
        what = f"{pipeline.micro_batches} is no multiple of the {groups} device groups"
        cure = "the interleaved schedule feeds micro batches in rounds of one per device group"
        problems.add(f"{where}.micro_batches", what, cure)
    for index, stage in enumerate(pipeline.stages):
        owner = pipeline.stages[index % groups]
        if (stage.places, stage.tp, stage.split) != (owner.places, owner.tp, owner.split):
            what = f"shares a device group with stages[{index % groups}], whose place differs"
            cure = "give both the same tp, split and place"
            problems.add(f"{where}.stages[{index}]", what, cure)


def _named_places(stage: Stage, at: str) -> Iterator[tuple[str, Place]]:
    if len(stage.places) == 1:
        yield at, stage.places[0]
    else:
        for index, place in enumerate(stage.places):
            yield f"{at}.places[{index}]", place


def _offers(cluster: Cluster) -> dict[PlaceKey, list[Pool]]:
    offers: dict[PlaceKey, list[Pool]] = {}
    for pool in cluster.pools:
        offers.setdefault((pool.gpu, pool.machine, pool.zone), []).append(pool)
    return offers


def _place_fault(
    place: Place, tp: int, cluster: Cluster, offers: Mapping[PlaceKey, list[Pool]]
) -> Problem | None:
    """Say why no pool of the cluster can hold a group of ``tp`` devices here; keys as places."""
    pools = offers.get((place.gpu, place.machine, place.zone))
    if pools is None:
        return _no_pool(place, cluster)
    largest = max(pool.gpus_per_machine for pool in pools)
    if tp > largest:
        what = f"{tp} is more than the {largest} GPUs of a machine ({place.machine})"
        return Problem("tp", what, "a TP group stays within one machine")
    if place.devices and len(place.devices) != tp:
        what = f"names {len(place.devices)} devices for tp {tp}"
        return Problem("devices", what, "name as many as tp says")
    outside = [device for device in place.devices if device >= largest]
    if outside:
        what = f"names device {outside[0]}, and a machine here has {largest}"
        return Problem("devices", what, f"count from 0 to {largest - 1}")
    return None


def _no_pool(place: Place, cluster: Cluster) -> Problem:
    """Find the key that is to blame: the zone, then the GPU kind in it, then the machine."""
    zones = sorted({pool.zone for pool in cluster.pools})
    if place.zone not in zones:
        what = f'the cluster has no pool in zone "{place.zone}"'
        return Problem("zone", what, nearest(place.zone, zones))
    kinds = sorted({pool.gpu for pool in cluster.pools if pool.zone == place.zone})
    if place.gpu not in kinds:
        try:
            cluster.catalogue.gpu_name(place.gpu)
        except InputError as error:
            known = error.problems[0]
            return Problem("gpu", known.what, known.cure)
        what = f'the cluster has no pool of "{place.gpu}" in zone {place.zone}'
        return Problem("gpu", what, f"there it has {', '.join(kinds)}")
    here = [p for p in cluster.pools if (p.zone, p.gpu) == (place.zone, place.gpu)]
    machines = ", ".join(sorted({f'"{pool.machine}"' for pool in here}))
    if not place.machine:
        what = f"is left out, and several kinds of machine have {place.gpu} in {place.zone}"
        return Problem("machine", what, f"give one of {machines}")
    what = f'the cluster has no "{place.machine}" with {place.gpu} in {place.zone}'
    return Problem("machine", what, f"there it has {machines}")


def _check_supply(
    plan: Plan,
    cluster: Cluster,
    offers: Mapping[PlaceKey, list[Pool]],
    place: str,
    problems: Problems,
) -> None:
    """The device groups of all pipelines fit into what is up and what could be had."""
    groups: dict[PlaceKey, Counter[int]] = {}
    for pipeline in plan.pipelines:
        for stage in plan.owning_stages(pipeline):
            for taken in stage.places:
                key = (taken.gpu, taken.machine, taken.zone)
                groups.setdefault(key, Counter())[stage.tp] += 1
    used_where: Counter[tuple[str, str]] = Counter()
    for (gpu, machine, zone), sizes in sorted(groups.items()):
        needed = sum(tp * count for tp, count in sizes.items())
        used_where[zone, gpu] += needed
        if (gpu, machine, zone) not in offers:
            continue  # said already, stage by stage
        pools = offers[gpu, machine, zone]
        up, more = sum(p.gpus for p in pools), sum(p.obtainable_gpus for p in pools)
        name = f"{machine} in {zone}"
        if needed > up + more:
            have = f"{up} are up and {more} could be had" if more else f"{up} are up"
            what = (
                f"takes {needed} {gpu} GPUs of {name}, where {have}: {needed - up - more} too many"
            )
            problems.add(place, what, "use fewer there, or raise the pool in the cluster file")
        else:
            _check_machines(sizes, pools, name, place, problems)
    _check_quotas(used_where, cluster, place, problems)


def _check_machines(
    sizes: Mapping[int, int], pools: list[Pool], name: str, place: str, problems: Problems
) -> None:
    """Groups stay within machines, so that the rests of machines may be of no use to them."""
    machines = [size for pool in pools for size in _machine_sizes(pool)]
    # Groups larger than any machine were told already, at their stages.
    largest = max(pool.gpus_per_machine for pool in pools)
    sizes = {tp: count for tp, count in sizes.items() if tp <= largest}
    for tp in sorted(sizes, reverse=True):
        # No machine holds more groups of at least this size than of exactly this size.
        wanted = sum(count for size, count in sizes.items() if size >= tp)
        room = sum(times * (size // tp) for size, times in machines)
        if wanted > room:
            what = (
                f"puts {wanted} groups of {tp} or more GPUs on {name}, whose machines hold {room}"
            )
            problems.add(place, what, "a TP group stays within one machine")
            return


def _machine_sizes(pool: Pool) -> Iterator[tuple[int, int]]:
    """Sizes of a pool's machines and how many there are of each, those to be had included."""
    for gpus in (pool.gpus, pool.obtainable_gpus):
        whole, rest = divmod(gpus, pool.gpus_per_machine)
        yield pool.gpus_per_machine, whole
        yield rest, 1


def _check_quotas(
    used: Mapping[tuple[str, str], int], cluster: Cluster, place: str, problems: Problems
) -> None:
    declared = dict(cluster.zone_regions)
    for quota in cluster.quotas:
        taken = 0
        for (zone, gpu), count in used.items():
            region = declared.get(zone, cluster.catalogue.zones.get(zone))
            if gpu == quota.gpu and quota.where in (zone, region):
                taken += count
        if taken > quota.gpus_max:
            over = taken - quota.gpus_max
            what = f"takes {taken} {quota.gpu} GPUs in {quota.where}, {over} more than the quota"
            cure = f"use at most {quota.gpus_max} there, or have the quota raised"
            problems.add(place, what, cure)


def _check_devices(plan: Plan, place: str, problems: Problems) -> None:
    """In a placed plan no device serves two groups."""
    owners: dict[tuple[str, int], str] = {}
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(plan.owning_stages(pipeline)):
            at = f"pipelines[{number}].stages[{index}]"
            for there, taken in _named_places(stage, at):
                for device in taken.devices:
                    assert taken.node is not None, "devices are read together with their node"
                    owner = owners.setdefault((taken.node, device), there)
                    if owner != there:
                        what = f"takes device {device} of {taken.node}, which {owner} has"
                        problems.add(f"{place}: {there}.devices", what, "name each device once")
