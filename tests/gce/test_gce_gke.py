"""A node pool of GKE: a group for each zone, and agents in pods, which end before their machines.

Nothing here waits for the clock: the test itself ends the pod as soon as the job has left. What
counts is that agents announce the pod's shorter time, and that sailord uses it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agents.cloud.notices import PREEMPTED, Notices
from agents.config import Config, load_config
from agents.core.model import Event, NoticeGiven
from agents.daemon.clock import Clock
from agents.protocol.records import NodeId
from tests.fakes.gce.cloud import Group, Vm
from tests.fakes.metadata import metadata_server
from tests.gce.rented_cluster import HERE, LARGE, NOTICE_S, THERE, RentedCluster, rented_cluster
from tests.processes import until
from tests.sailord.providers.emulated_cluster import wait_until

POD_S = 15.0
"""Seconds of a Spot machine's 30 that GKE leaves to pods that are not the system's own."""
CAPACITY = """
surplus_s = 4.0
lost_s = 3.0
delete_again_s = 3.0
"""


MANIFEST = Path(__file__).resolve().parents[2] / "examples" / "gke" / "agents.yaml"


def agent_of(folder: Path) -> Config:
    """The agent as the manifest configures it."""
    yaml = pytest.importorskip("yaml")
    settings = list(yaml.safe_load_all(MANIFEST.read_text()))[2]
    path = folder / "agent.toml"
    text = settings["data"]["agent.toml"].replace("NODE", "gke-1").replace("ADDRESS", "10.0.0.7")
    (folder / "ca.pem").touch()
    path.write_text(text.replace("/etc/sailor/key/", f"{folder}/"))
    return load_config(path)


async def test_an_agent_in_a_pod_announces_the_pods_grace_period(tmp_path, monkeypatch):
    agent, events = agent_of(tmp_path), list[Event]()
    notices = Notices(NodeId("n"), agent.notice_s, agent.shutdown_s, Clock(), events.append)
    async with metadata_server() as server, aiohttp.ClientSession() as session:
        monkeypatch.setenv("GCE_METADATA_HOST", server.address)
        watch = asyncio.create_task(notices.watch(session))
        await until(lambda: server.waiting == 2)
        await server.flip(PREEMPTED, "TRUE")
        await until(lambda: events)
        watch.cancel()
        await asyncio.wait([watch])
    (seen,) = events
    assert isinstance(seen, NoticeGiven)
    assert seen.leaves_at == seen.at + POD_S


def pool_of(zone: str) -> Group:
    """What is behind a node pool in one zone."""
    properties = {
        "machineType": LARGE,
        "labels": {"sailor-cluster": "local"},
        "scheduling": {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"},
        "disks": [{"boot": True, "autoDelete": True}],
    }
    return Group(f"gke-local-{zone}-grp", zone, properties)


# test_gce_story has the same on machines with more time.
@pytest.mark.at_length
def test_a_job_moves_off_a_gke_node_before_its_pod_ends(tmp_path_factory):
    groups = [pool_of(zone) for zone in (HERE, THERE)]
    with rented_cluster(tmp_path_factory.mktemp("gke") / "c", CAPACITY, POD_S, groups) as life:
        _tell(life)
        books = life.end_job()
        assert books.spent_usd == pytest.approx(life.cloud.bill(), rel=0.02)
    assert [list(group.wanted) for group in groups] == [[], []], "nothing turns up later"
    assert not any("bulkInsert" in line for line in life.cloud.asked)


def _tell(life: RentedCluster) -> None:
    cloud = life.cloud
    cloud.stock = {(HERE, LARGE, True): 1, (THERE, LARGE, True): 1}
    life.submit()
    wait_until(lambda: life.trains_on(2))
    taken = next(vm for vm in cloud.there() if vm.zone == HERE)

    flipped_at = time.time()
    life.machines.warned(taken, NOTICE_S)
    left_s = wait_until(lambda: _leaves_at(life, taken)) - time.time()
    assert left_s < POD_S + 1.0 < NOTICE_S, "a pod has less time than its machine"
    assert left_s > POD_S - 1.0 - (time.time() - flipped_at)
    wait_until(lambda: taken.name not in life.job()["members"])
    assert taken.status == "RUNNING"
    life.machines.ended(taken)  # The pod alone: Google leaves the machine some time more.
    life.wait_for_steps()
    wait_until(lambda: not taken.is_there)
    assert taken.off_at is None, "it was given back before Google took it"
    assert taken.name not in cloud.groups[pool_of(HERE).name].wanted, "its group makes no other"
    life.wait_for_steps()
    lost = [text for text in life.history() if " lost): " in text]
    assert lost, "generations are told with what they lost"
    assert all("0 steps lost" in text for text in lost), lost


def _leaves_at(life: RentedCluster, vm: Vm) -> float | None:
    nodes: list[dict[str, Any]] = life.client.ask("GET", "/v1/nodes")["nodes"]
    return next((node["leaves_at"] for node in nodes if node["name"] == vm.name), None)
