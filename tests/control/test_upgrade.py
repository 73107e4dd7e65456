"""A rolling upgrade to the next version and back, or from the previous one, while a job runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from agents.protocol.records import JobId
from agents.protocol.store_keys import Keys
from agents.store.factory import open_store
from tests.agents.store.places import NEEDS_ETCD
from tests.agents.store.places import Cluster as Etcd
from tests.chaos.other_version import FIELD, environment
from tests.control.cluster import LEASE_S, Cluster, is_leader
from tests.control.recording import recording
from tests.control.test_kill import has_new_agent, node_of, order
from tests.processes import wait_until
from tests.sailord.daemon.running import Place

pytestmark = [pytest.mark.chaos, pytest.mark.slow, NEEDS_ETCD]
NAMES = ("a", "b", "c")
AT_LENGTH = "SAILOR_EXAMPLES" in os.environ
"""In `make chaos`."""


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    """Two sailords on an etcd."""
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(closing(Etcd(1)))
        made = Cluster(
            tmp_path,
            [Place(tmp_path, name, store=etcd.url) for name in ("h", "i")],
            agents_lease_s=30.0,
        )
        stack.callback(made.end)
        yield made


@contextlib.contextmanager
def longest_without_a_leader(cluster: Cluster) -> Iterator[list[float]]:
    """Measure it until the end of the block, in seconds."""
    found, ended = [0.0], threading.Event()

    def look() -> None:
        led = time.monotonic()
        while not ended.wait(0.02):
            if any(map(is_leader, cluster.heads)):
                found[0] = max(found[0], time.monotonic() - led)
                led = time.monotonic()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def replace_head(cluster: Cluster, head: Place, version: int) -> None:
    """Restart a sailord as systemd does, in another version."""
    process = head.processes[-1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(150) == 0
    head.environment = environment(version)
    head.start()
    wait_until(lambda: head.ask("GET", "/readyz")[0] == 200)
    wait_until(cluster.is_running)


def replace_agent(cluster: Cluster, name: str, version: int) -> None:
    """Restart an agent without its workers, in another version."""
    agent = cluster.agents[name]
    node = wait_until(lambda: node_of(led(cluster), name))
    assert agent.process is not None
    agent.process.send_signal(signal.SIGINT)
    agent.process.wait(150)
    agent.environment = environment(version)
    agent.start()
    wait_until(lambda: has_new_agent(led(cluster), node, -1), within_s=180)


def led(cluster: Cluster) -> Cluster:
    """Return the cluster with its leader alone, which answers."""
    return Cluster(cluster.folder, [cluster.head])


def upgrade(cluster: Cluster, version: int) -> None:
    """Replace one process after the other: the standby, the leader, then the nodes.

    With half of them replaced the job moves to other nodes, twice: each version reads what the
    other one wrote.
    """
    standby = next(head for head in cluster.heads if not is_leader(head))
    for head in (standby, next(head for head in cluster.heads if head is not standby)):
        replace_head(cluster, head, version)
        check(cluster)
    for name in NAMES:
        replace_agent(cluster, name, version)
        check(cluster)
        if name == "b":
            move(cluster)
            move(cluster)


def move(cluster: Cluster) -> None:
    """Move the job off one of its nodes; those that were drained before may be used again."""
    left = cluster.job()["members"][0]
    for name in NAMES:
        if node_of(led(cluster), name)["state"] == "draining":
            order(cluster.head, "withdraw", name)
    order(cluster.head, "drain", left)
    # On a busy machine the planner may take a minute.
    wait_until(lambda: cluster.is_running() and left not in cluster.job()["members"], within_s=180)


def check(cluster: Cluster) -> None:
    """Check that no process reports an unreadable record, and that the job goes on."""
    cluster.wait_steps()
    assert wait_until(cluster.head.status)["unreadable"] == {}


def job_record(cluster: Cluster) -> Any:
    async def read() -> Any:
        store = await open_store(cluster.heads[0].store_url)
        entry = await store.get(Keys("test").state(JobId("j")))
        await store.close()
        assert entry is not None
        return json.loads(entry.value)

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("before", "after", "goes_back"),
    [
        pytest.param(0, 1, False, id="to the next version"),
        pytest.param(0, 1, True, id="and back", marks=pytest.mark.at_length),
        pytest.param(-1, 0, True, id="from the last version and back", marks=pytest.mark.at_length),
    ],
)
def test_rolling_upgrade_loses_no_step(cluster, before, after, goes_back):
    for head in cluster.heads:
        head.environment = environment(before)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment(before).items():
            patched.setenv(name, value)
        cluster.begin(*NAMES)
    with recording(cluster) as recorded, longest_without_a_leader(cluster) as gap:
        upgrade(cluster, after)
        if after > 0:
            assert FIELD in job_record(cluster)
        if goes_back:
            upgrade(cluster, before)
    recorded.check()
    if after > 0:  # The leader wrote it anew, and does not know the field.
        assert FIELD in job_record(cluster)
    texts = [text for text in cluster.history() if " lost): " in text]
    assert len(texts) > (4 if goes_back else 2)
    assert all("0 steps lost" in text for text in texts), texts
    for head in cluster.heads:
        log = (cluster.folder / f"{head.name}.log").read_text()
        assert "passed over" not in log
        assert '"level": "error"' not in log
    print(f"{len(texts)} generations, step {recorded.counts[-1][2]}; no leader for {gap[0]:.2f} s")
    if AT_LENGTH:
        assert gap[0] <= LEASE_S
