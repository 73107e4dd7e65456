"""Parts of a cluster: fewer kinds, zones or machines, each once and never more than there is."""

from __future__ import annotations

from planner.compare.sub_clusters import TRIED_MAX, sub_clusters
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue


def pool(gpu: str, zone: str, machines: int) -> Pool:
    return Pool(zone, gpu, f"{gpu}x4", 4, 4 * machines)


def parts(*pools: Pool) -> list[dict[str, int]]:
    found = sub_clusters(Cluster(pools, load_catalogue()))
    return [{f"{p.gpu}@{p.zone}": p.gpus for p in one.pools} for one in found]


def test_the_whole_cluster_is_searched_first() -> None:
    some = parts(pool("A100-40", "a", 4), pool("T4", "b", 2))
    assert some[0] == {"A100-40@a": 16, "T4@b": 8}
    assert {"A100-40@a": 16} in some
    assert {"T4@b": 8} in some
    assert {"A100-40@a": 8, "T4@b": 4} in some
    # A quarter of two machines is no machine.
    assert {"A100-40@a": 4} in some
    assert all(one for one in some)
    assert len(some) == len({tuple(one.items()) for one in some})


def test_one_machine_has_no_parts() -> None:
    assert parts(pool("A100-40", "a", 1)) == [{"A100-40@a": 4}]


def test_kinds_and_zones_are_left_out() -> None:
    some = parts(pool("A100-40", "a", 1), pool("T4", "a", 1), pool("A100-40", "b", 1))
    assert {"A100-40@a": 4, "A100-40@b": 4} in some
    assert {"A100-40@a": 4, "T4@a": 4} in some


def test_large_clusters_have_a_limited_number_of_parts() -> None:
    pools = [pool(gpu, zone, 8) for gpu in ("A100-40", "T4", "L4") for zone in "abcde"]
    assert len(parts(*pools)) == TRIED_MAX
