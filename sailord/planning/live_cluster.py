"""Makes a cluster for the planner from the live nodes, with prices and measured links."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agents.protocol.records import NodeRecord
from planner.problem.objective import Limits
from planner.replan.nodes import PlannerNode
from planner.replan.state_map import placed_stages
from sailord.planning.messages import PlanRequest, PoolPrice
from simulator.api import load_measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.cluster_file import load_cluster
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job
from simulator.spec.plan import Plan

Profiles = tuple[Path | None, tuple[tuple[str, int], ...]]
"""The folder of measurements, and its files with the time of their last change."""
_SEEN: dict[Path, Profiles] = {}


def files_of(request: PlanRequest) -> Profiles:
    """The profiles as they are now, or as they were last seen if the folder cannot be read."""
    folder = request.profiles
    if folder is None:
        return None, ()
    with contextlib.suppress(OSError):
        files = [path for path in folder.iterdir() if path.suffix == ".json"]
        changes = sorted((path.name, path.stat().st_mtime_ns) for path in files)
        _SEEN[folder] = folder, tuple(changes)
    return _SEEN.get(folder, (folder, ()))


def priced_nodes(
    job: Job, request: PlanRequest, before: Plan | None
) -> tuple[tuple[PlannerNode, ...], tuple[str, ...]]:
    """The nodes that a plan may use, and why others are left out.

    Where dollars count, one of unknown price can only be used if the job runs on it already.
    """
    nodes = tuple(planner_node(record) for record in request.nodes)
    if not Limits(job.objective).needs_prices:
        return nodes, ()
    used = {place.node for _, place in placed_stages(before)} if before is not None else set()
    cluster = cluster_of(request.cluster_file, nodes, request.prices)
    priced = of_known_price(nodes, cluster, MeasuredNetwork())
    if len(priced) < len(nodes):
        links = None if request.links is None else request.links[0]
        found = load_measurements(request.profiles, catalogue=cluster.catalogue, links=links)
        priced = of_known_price(nodes, cluster, found.network)
    kept = tuple(node for node in nodes if node.id in used or node in priced)
    kinds = sorted({f"{n.machine} in {n.zone}" for n in set(nodes).difference(kept)})
    if not kinds:
        return nodes, ()
    cure = "add it to the cluster file with price_usd_per_gpu_hour"
    return kept, (
        f"not used, since dollars count and no price is known: {'; '.join(kinds)}; {cure}",
    )


def of_known_price(
    nodes: Iterable[PlannerNode], cluster: Cluster, measured: MeasuredNetwork
) -> frozenset[PlannerNode]:
    """Return the nodes whose pool has a price in a file or the catalogue."""
    facts = PlaceFacts(cluster, measured)
    priced = {(p.key, p.spot) for p in cluster.pools if facts.pool_price_usd(p) is not None}
    return frozenset(node for node in nodes if (node.key, node.spot) in priced)


def planner_node(record: NodeRecord) -> PlannerNode:
    """Convert a node record to the planner's node."""
    return PlannerNode(
        record.id, record.gpu, record.machine, record.zone, record.gpus, spot=record.spot
    )


def ran_on(before: Plan, request: PlanRequest) -> list[PlannerNode]:
    """The machines of the running plan; unknown ones are reconstructed from the plan itself.

    A new leader has never seen nodes that were lost before its election; they were spot nodes where
    there are any.
    """
    known: dict[str, PlannerNode] = {record.id: planner_node(record) for record in request.ran_on}
    places = {place.node: place for _, place in placed_stages(before) if place.node is not None}
    live = [planner_node(record) for record in request.nodes]
    unknown = places.keys() - known.keys() - {node.id for node in live}
    if unknown:
        seen = [*live, *known.values()]
        pools = cluster_of(request.cluster_file, seen).pools
        spot = {pool.key for pool in pools if pool.spot}
        for name in sorted(unknown):
            place = places[name]
            gpus = max(place.devices, default=0) + 1
            known[name] = PlannerNode(name, *place.key, gpus, place.key in spot)
    return list(known.values())


def cluster_of(
    file: Path, nodes: Sequence[PlannerNode], provider_prices: Iterable[PoolPrice] = ()
) -> Cluster:
    """The cluster of the file, with a pool added for each node that fits none of the file's.

    A pool of the provider has the provider's price, whatever the file says.
    """
    cluster = load_cluster(file)
    known = {(pool.gpu, pool.machine, pool.zone, pool.spot) for pool in cluster.pools}
    prices = {(pool.gpu, pool.zone, pool.spot): pool for pool in cluster.pools}
    pools: list[Pool] = []
    for node in sorted(nodes):
        key = (node.gpu, node.machine, node.zone, node.spot)
        if key not in known:
            known.add(key)
            like = prices.get((node.gpu, node.zone, node.spot))
            pool = Pool(node.zone, node.gpu, node.machine, node.gpus, 0, spot=node.spot)
            if like is not None:
                price, source = like.price_usd_per_gpu_hour, like.price_source
            else:
                price, source = _catalogue_price(cluster, node), "catalogue"
            if price is not None:
                pool = replace(pool, price_usd_per_gpu_hour=price, price_source=source)
            pools.append(pool)
    rented = {(p.gpu, p.machine, p.zone, p.spot): p.usd_per_gpu_hour for p in provider_prices}
    return replace(cluster, pools=tuple(_apply_prices((*cluster.pools, *pools), rented)), quotas=())


def _apply_prices(
    pools: Iterable[Pool], prices: Mapping[tuple[str, str, str, bool], float]
) -> Iterator[Pool]:
    for pool in pools:
        price = prices.get((pool.gpu, pool.machine, pool.zone, pool.spot))
        if price is None:
            yield pool
        else:
            yield replace(pool, price_usd_per_gpu_hour=price, price_source="provider")


def _catalogue_price(cluster: Cluster, node: PlannerNode) -> float | None:
    """The built-in price of a machine type that the cluster file does not list."""
    known = node.machine in cluster.catalogue.machines
    with contextlib.suppress(InputError):  # Its zone or GPU kind may be unknown.
        return cluster.catalogue.price_usd_per_gpu_hour(
            node.machine if known else node.gpu,
            zone=node.zone,
            spot=node.spot,
            gpus_per_machine=node.gpus,
            extra_regions=dict(cluster.zone_regions),
        )
    return None
