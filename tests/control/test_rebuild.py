"""The head destroyed and rebuilt: from a backup, from etcd, and from nothing but the agents."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from tests.agents.store.places import ETCD
from tests.agents.store.places import Cluster as Etcd
from tests.control.cluster import JOB, Cluster, is_leader
from tests.control.recording import recording
from tests.control.test_kill import order
from tests.processes import wait_until
from tests.sailord.daemon.running import ROOT, Place

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


def back_up(cluster: Cluster) -> None:
    """Run the documented command while sailord runs."""
    file, config = cluster.folder / "backup.db", cluster.heads[0].config
    subprocess.run(
        [sys.executable, "-m", "sailord.main", "backup", file, "--config", config],
        cwd=ROOT, check=True,
    )  # fmt: skip


def destroy_head(cluster: Cluster) -> None:
    """Kill sailord, and delete its state folder."""
    (head,) = cluster.heads
    head.processes[-1].kill()
    head.processes[-1].wait()
    shutil.rmtree(cluster.folder / head.name)


def restore(cluster: Cluster) -> None:
    """Do what docs/operations.md says, and start sailord."""
    folder = cluster.folder / cluster.heads[0].name
    folder.mkdir(mode=0o700)
    shutil.copy(cluster.folder / "backup.db", folder / "store.db")
    cluster.heads[0].start()
    wait_until(lambda: is_leader(cluster.head))


def start_anew(cluster: Cluster) -> None:
    """Start sailord with nothing."""
    cluster.heads[0].start()
    wait_until(lambda: is_leader(cluster.head))
    wait_until(lambda: cluster.head.status()["nodes"].get("ready") == len(cluster.agents))


def move(cluster: Cluster, name: str, *, back: bool = False) -> None:
    """Move the job off a node, or back onto all."""
    order(cluster.head, "withdraw" if back else "drain", name)
    members = sorted(cluster.agents) if back else sorted({*cluster.agents} - {name})

    def has_moved() -> bool:
        return cluster.is_running() and sorted(cluster.job()["members"]) == members

    wait_until(has_moved, within_s=120.0)


def lost_steps(cluster: Cluster) -> list[str]:
    return [t for t in cluster.history() if " lost): " in t and " 0 steps lost): " not in t]


def goes_on(cluster: Cluster, generation: int, workers: dict[str, dict[str, int]]) -> None:
    """Assert that the same workers train on, and that the job can be moved again."""
    step = cluster.count()[1]
    wait_until(lambda: cluster.is_running(beyond=step))
    assert cluster.count()[0] == generation
    assert cluster.workers() == workers
    move(cluster, "b")
    assert cluster.count()[0] == generation + 1


def test_head_is_rebuilt_from_an_older_backup(cluster):
    cluster.begin("a", "b")
    back_up(cluster)
    move(cluster, "a")
    move(cluster, "a", back=True)
    cluster.wait_steps()
    generation, workers = cluster.count()[0], cluster.workers()
    assert generation == 3
    with recording(cluster) as recorded:
        destroy_head(cluster)
        cluster.wait_steps()
        restore(cluster)
        goes_on(cluster, generation, workers)
    assert lost_steps(cluster) == []
    recorded.check_steps()  # The store's records go from the backup's to the recovered one.


def test_agents_restarted_without_a_head_still_know_their_generation(cluster):
    cluster.begin("a", "b")
    back_up(cluster)
    move(cluster, "a")
    move(cluster, "a", back=True)
    workers = cluster.workers()
    destroy_head(cluster)
    for agent in cluster.agents.values():
        agent.kill()
        agent.start()
    cluster.wait_steps()
    restore(cluster)
    step = cluster.count()[1]
    wait_until(lambda: cluster.is_running(beyond=step))
    assert cluster.workers() == workers
    assert lost_steps(cluster) == []


def test_without_a_backup_and_workers_the_job_goes_on_from_memory(cluster):
    cluster.begin("a", "b")
    cluster.wait_steps(25)
    destroy_head(cluster)
    for workers in cluster.workers().values():
        for pid in workers.values():
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(cluster.workers().values()))
    start_anew(cluster)
    code, said = cluster.head.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})
    assert code == 201, said
    wait_until(lambda: cluster.is_running(beyond=25))
    assert cluster.count()[0] == 2
    assert any(" from step " in text and "(memory" in text for text in cluster.history())


@pytest.mark.at_length
def test_without_a_backup_the_job_is_submitted_again_and_goes_on(cluster):
    cluster.begin("a", "b")
    move(cluster, "a")
    move(cluster, "a", back=True)
    cluster.wait_steps()
    generation, workers = cluster.count()[0], cluster.workers()
    destroy_head(cluster)
    start_anew(cluster)
    wait_until(lambda: "submit" in str(cluster.head.status()["unreadable"]))
    cluster.wait_steps()
    code, said = cluster.head.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})
    assert code == 201, said
    step = cluster.count()[1]
    wait_until(lambda: cluster.is_running(beyond=step))
    assert cluster.count()[0] == generation
    assert cluster.workers() == workers
    assert cluster.head.status()["unreadable"] == {}
    move(cluster, "b")
    assert cluster.count()[0] == generation + 1
    assert lost_steps(cluster) == []


@pytest.fixture
def on_etcd(tmp_path):
    """One sailord and an etcd of three members."""
    with closing(Etcd(3)) as etcd:
        made = Cluster(tmp_path, [Place(tmp_path, store=etcd.url)])
        yield made, etcd
        made.end()


def etcdctl(etcd: Etcd, *words: str) -> str:
    """Run etcdctl as the documents do."""
    done = subprocess.run(
        ["etcdctl", f"--endpoints={','.join(etcd.endpoints)}", *words],
        env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


needs_etcd = pytest.mark.skipif(
    ETCD is None or shutil.which("etcdctl") is None,
    reason="no `etcd` and `etcdctl` here; apt-get install etcd-server etcd-client",
)


@needs_etcd
def test_a_new_head_needs_etcd_and_the_key_alone(on_etcd):
    cluster, etcd = on_etcd
    cluster.begin("a", "b")
    workers = cluster.workers()
    with recording(cluster) as recorded:
        destroy_head(cluster)
        cluster.heads[0].config.unlink()
        cluster.wait_steps()
        cluster.heads[:] = [Place(cluster.folder, "new", store=etcd.url)]
        cluster.heads[0].start()
        wait_until(lambda: is_leader(cluster.head))
        step = cluster.count()[1]
        wait_until(lambda: cluster.is_running(beyond=step))
        assert cluster.workers() == workers
        move(cluster, "b")
    recorded.check()
    assert lost_steps(cluster) == []


@needs_etcd
def test_etcd_is_restored_from_an_older_snapshot(on_etcd):
    cluster, etcd = on_etcd
    cluster.begin("a", "b")
    # One member only: `snapshot save` takes a single address.
    file = str(cluster.folder / "etcd.snapshot")
    subprocess.run(
        ["etcdctl", f"--endpoints={etcd.endpoints[0]}", "snapshot", "save", file],
        env={**os.environ, "ETCDCTL_API": "3"}, check=True,
    )  # fmt: skip
    move(cluster, "a")
    move(cluster, "a", back=True)
    generation, workers = cluster.count()[0], cluster.workers()
    with recording(cluster) as recorded:
        # A lost quorum: two of three members and their disks; the third cannot write alone.
        etcd.kill()
        cluster.heads[0].processes[-1].kill()
        cluster.heads[0].processes[-1].wait()
        cluster.wait_steps()
        etcd.restore(file)
        etcd.start()
        cluster.heads[0].start()
        wait_until(lambda: is_leader(cluster.head))
        goes_on(cluster, generation, workers)
    recorded.check_steps()
    assert lost_steps(cluster) == []


@needs_etcd
def test_a_full_etcd_is_emptied_while_the_job_trains(tmp_path):
    arguments = ("--quota-backend-bytes", str(16 << 20))
    with closing(Etcd(1, arguments=arguments)) as etcd:
        cluster = Cluster(tmp_path, [Place(tmp_path, store=etcd.url)])
        try:
            cluster.begin("a", "b")
            fill(etcd)
            assert "NOSPACE" in etcdctl(etcd, "alarm", "list")
            assert cluster.head.ask("POST", "/v1/nodes/b/drain", {})[0] == 503
            cluster.wait_steps()
            # What docs/operations.md says.
            status = json.loads(etcdctl(etcd, "endpoint", "status", "-w", "json"))
            revision = status[0]["Status"]["header"]["revision"]
            etcdctl(etcd, "compact", str(revision))
            etcdctl(etcd, "--command-timeout=60s", "defrag")
            etcdctl(etcd, "alarm", "disarm")
            step = cluster.count()[1]
            wait_until(lambda: cluster.is_running(beyond=step))
            move(cluster, "b")
            assert lost_steps(cluster) == []
        finally:
            cluster.end()


def fill(etcd: Etcd) -> None:
    """Overwrite a key until etcd refuses."""
    for _ in range(400):
        done = subprocess.run(
            ["etcdctl", f"--endpoints={etcd.endpoints[0]}", "put", "/filler", "x" * 100_000],
            env={**os.environ, "ETCDCTL_API": "3"}, check=False, capture_output=True, text=True,
        )  # fmt: skip
        if "space exceeded" in done.stderr:
            return
    raise AssertionError("etcd was never full")
