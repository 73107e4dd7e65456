"""Checks that a cluster can supply a plan: places, machine sizes, GPUs, quotas and devices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from simulator.cluster.cluster import Cluster, Pool
from simulator.documents.problems import InputError, Problem, Problems, nearest
from simulator.spec.plan import Place, PlaceKey, Plan, Stage


def places_with_paths(stage: Stage, at: str) -> Iterator[tuple[str, Place]]:
    """Yield each place of a stage with its path in the plan file."""
    if len(stage.places) == 1:
        yield at, stage.places[0]
    else:
        for index, place in enumerate(stage.places):
            yield f"{at}.places[{index}]", place


def pools_by_place(cluster: Cluster) -> dict[PlaceKey, list[Pool]]:
    """Group the pools by place; spot and on-demand pools of a machine type come together."""
    offers: dict[PlaceKey, list[Pool]] = {}
    for pool in cluster.pools:
        offers.setdefault(pool.key, []).append(pool)
    return offers


def place_problem(
    place: Place, tp: int, cluster: Cluster, offers: Mapping[PlaceKey, list[Pool]]
) -> Problem | None:
    """Return why no pool can hold a group of ``tp`` devices here, at the key that is wrong."""
    pools = offers.get(place.key)
    if pools is None:
        return _no_pool(place, cluster)
    largest = max(pool.gpus_per_machine for pool in pools)
    if tp > largest:
        what = f"{tp} is more than the {largest} GPUs of a machine ({place.machine})"
        return Problem("tp", what, "a TP group stays within one machine")
    if place.devices and len(place.devices) != tp:
        what = f"names {len(place.devices)} devices for tp {tp}"
        return Problem("devices", what, f"name {tp} devices")
    outside = [device for device in place.devices if device >= largest]
    if outside:
        what = f"names device {outside[0]}, and a machine here has {largest}"
        return Problem("devices", what, f"count from 0 to {largest - 1}")
    return None


def _no_pool(place: Place, cluster: Cluster) -> Problem:
    """Find the wrong key: the zone, else the GPU kind in it, else the machine type."""
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
        return Problem("gpu", what, f"choose from {', '.join(kinds)}")
    here = [p for p in cluster.pools if (p.zone, p.gpu) == (place.zone, place.gpu)]
    machines = ", ".join(sorted({f'"{pool.machine}"' for pool in here}))
    if not place.machine:
        what = f"is missing, and several machine types have {place.gpu} in {place.zone}"
        return Problem("machine", what, f"give one of {machines}")
    what = f'the cluster has no "{place.machine}" with {place.gpu} in {place.zone}'
    return Problem("machine", what, f"choose from {machines}")


def groups_by_place(plan: Plan) -> dict[PlaceKey, dict[int, int]]:
    """Number of device groups that a plan takes from each place, by TP degree."""
    found: defaultdict[PlaceKey, Counter[int]] = defaultdict(Counter)
    for pipeline in plan.pipelines:
        for stage in plan.owning_stages(pipeline):
            for place in stage.places:
                found[place.key][stage.tp] += 1
    return {key: dict(counts) for key, counts in sorted(found.items())}


def check_supply(
    plan: Plan,
    cluster: Cluster,
    offers: Mapping[PlaceKey, list[Pool]],
    place: str,
    problems: Problems,
) -> None:
    """Check that GPUs that are up or obtainable suffice for the device groups of all pipelines."""
    used_where: Counter[tuple[str, str]] = Counter()
    for (gpu, machine, zone), sizes in groups_by_place(plan).items():
        needed = sum(tp * count for tp, count in sizes.items())
        used_where[zone, gpu] += needed
        if (gpu, machine, zone) not in offers:
            continue  # place_problem has reported it.
        pools = offers[gpu, machine, zone]
        up, more = sum(p.gpus for p in pools), sum(p.obtainable_gpus for p in pools)
        name = f"{machine} in {zone}"
        if needed > up + more:
            have = f"{up} are up and {more} are obtainable" if more else f"{up} are up"
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
    """Check that the device groups fit machine by machine, since no group spans machines."""
    machines = [
        some for p in pools for gpus in (p.gpus, p.obtainable_gpus) for some in p.machines(gpus)
    ]
    # place_problem has reported groups that are larger than any machine.
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


def _check_quotas(
    used: Mapping[tuple[str, str], int], cluster: Cluster, place: str, problems: Problems
) -> None:
    for quota in cluster.quotas:
        taken = sum(
            count
            for (zone, gpu), count in used.items()
            if gpu == quota.gpu and quota.where in (zone, cluster.region_of(zone))
        )
        if taken > quota.gpus_max:
            over = taken - quota.gpus_max
            what = f"takes {taken} {quota.gpu} GPUs in {quota.where}, {over} more than the quota"
            cure = f"use at most {quota.gpus_max} there, or raise the quota"
            problems.add(place, what, cure)


def check_devices(plan: Plan, place: str, problems: Problems) -> None:
    """Check that no device of a placed plan serves two groups."""
    owners: dict[tuple[str, int], str] = {}
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(plan.owning_stages(pipeline)):
            at = f"pipelines[{number}].stages[{index}]"
            for there, taken in places_with_paths(stage, at):
                for device in taken.devices:
                    assert taken.node is not None, "devices are read together with their node"
                    owner = owners.setdefault((taken.node, device), there)
                    if owner != there:
                        what = f"takes device {device} of {taken.node}, which {owner} uses"
                        problems.add(f"{place}: {there}.devices", what, "name each device once")


def check_nodes(
    plan: Plan, offers: Mapping[PlaceKey, list[Pool]], place: str, problems: Problems
) -> None:
    """Check that the groups on a node fit a machine, where the plan does not name all devices."""
    taken: Counter[tuple[PlaceKey, str]] = Counter()
    unnamed: set[tuple[PlaceKey, str]] = set()
    for pipeline in plan.pipelines:
        for stage in plan.owning_stages(pipeline):
            for where in stage.places:
                if where.node is not None:
                    taken[where.key, where.node] += stage.tp
                    if not where.devices:
                        unnamed.add((where.key, where.node))
    for key, node in sorted(unnamed):
        most = max((pool.gpus_per_machine for pool in offers.get(key, ())), default=None)
        gpus = taken[key, node]
        if most is not None and gpus > most:
            what = f"puts groups of {gpus} GPUs on {node}, and a machine there has {most}"
            problems.add(place, what, "name another node for some of them")
