"""The procedure of docs/operations.md, A standby sailord, with an etcd, all under TLS."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agents.rpc.certificates import share_of_life_left
from sailord.authority import Authority
from tests.agents.store.places import NEEDS_ETCD
from tests.agents.store.places import Cluster as Etcd
from tests.control.cluster import Agent, Cluster, is_leader
from tests.control.recording import recording
from tests.processes import SAILORCTL, wait_until
from tests.sailord.daemon.running import ROOT, Place

pytestmark = [pytest.mark.chaos, pytest.mark.slow, NEEDS_ETCD]
HEAD = '[tls]\nauthority = "ca"\n'
STANDBY = '[tls]\nca = "two/tls/ca.pem"\nenrol = "127.0.0.1:{port}"\n'


def ca(folder: Path, *words: str, authority: str = "ca") -> None:
    """Run ``sailorctl ca`` where the authority is."""
    command = [*SAILORCTL, "ca", *words, "--folder", folder / authority]
    subprocess.run(command, cwd=ROOT, check=True)


def log_of(cluster: Cluster, name: str) -> str:
    return (cluster.folder / f"{name}.log").read_text(errors="replace")


def start_agents(cluster: Cluster, store: str, *names: str) -> None:
    """Start agents that enrol at either machine, and show etcd their own certificates."""
    both = ",".join(f"127.0.0.1:{head.port}" for head in cluster.heads)
    for name in names:
        url = store.replace("STATE", str(cluster.folder / name))
        agent = Agent(cluster.folder, name, url, enrols_at=both)
        agent.lease_s = cluster.agents_lease_s
        cluster.agents[name] = agent
        agent.start()


@pytest.fixture
def store(tmp_path) -> Iterator[str]:
    """The address of an etcd under TLS; ``STATE`` is a process's state folder."""
    Authority.create(tmp_path / "ca", "test")
    ca(tmp_path, "issue", "store/one", "--host", "127.0.0.1", "--out", str(tmp_path / "etcd"))
    files = tmp_path / "etcd"
    arguments = (
        *("--cert-file", str(files / "certificate.pem"), "--key-file", str(files / "key.pem")),
        *("--trusted-ca-file", str(files / "ca.pem"), "--client-cert-auth"),
    )
    with closing(Etcd(arguments=arguments, scheme="https")) as etcd:
        own = "&cert=STATE/tls/certificate.pem&key=STATE/tls/key.pem"
        yield f"{etcd.url}&ca={files}/ca.pem{own}"


@pytest.fixture(params=[STANDBY])
def cluster(tmp_path, store, request) -> Iterator[Cluster]:
    """The head node with the authority, which leads, and a standby with a certificate of it."""
    heads: list[Place] = []
    for name, tls in (("one", HEAD), ("two", request.param)):
        text = tls.format(port=heads[0].port if heads else None)
        own = store.replace("STATE", f"{tmp_path}/{name}")
        heads.append(Place(tmp_path, name=name, store=own, webhooks=text))
    made = Cluster(tmp_path, heads, agents_lease_s=30.0)
    # Most of its life is over, as after a while.
    ca(tmp_path, "issue", "sailord/two", "--days", "0.003", "--out", str(tmp_path / "two" / "tls"))
    ca(tmp_path, "issue", "user/alice", "--out", str(tmp_path / "alice"))
    try:
        heads[0].start()
        wait_until(lambda: is_leader(heads[0]))
        heads[1].start()
        wait_until(lambda: "leads" in heads[1].ask("GET", "/readyz")[1])
        yield made
    finally:
        made.end()


def status_by(cluster: Cluster, head: Place) -> int:
    """Return the exit code of ``sailorctl status`` from elsewhere."""
    words = ("--server", f"https://127.0.0.1:{head.port}", "--tls", str(cluster.folder / "alice"))
    token = ("--token-file", str(cluster.folder / "token"))
    return subprocess.run([*SAILORCTL, "status", *words, *token], cwd=ROOT, check=False).returncode


def test_a_standby_takes_over_and_becomes_the_head_node(cluster, store):
    folder, (head, standby) = cluster.folder, cluster.heads
    start_agents(cluster, store, "a", "b")
    cluster.begin(heads=False)
    # It renewed its certificate by itself, and fetched the list of revoked ones.
    wait_until(lambda: "got a certificate" in log_of(cluster, "two"))
    assert share_of_life_left(folder / "two" / "tls" / "certificate.pem") > 0.9
    wait_until(lambda: "certificates reloaded" in log_of(cluster, "two"))
    assert status_by(cluster, standby) == 0  # The leader answers.
    with recording(cluster) as recorded:
        head.processes[-1].kill()
        wait_until(lambda: is_leader(standby))
        step = cluster.count()[1]
        wait_until(lambda: standby.status()["job"]["step"] > step)
        assert status_by(cluster, standby) == 0
        # Nothing signs for a new node, until the standby has the lost head node's authority.
        start_agents(cluster, store, "c")
        wait_until(lambda: "this sailord signs no certificates" in log_of(cluster, "c"))
        (folder / "ca").rename(folder / "backup")
        toml = standby.config.read_text()
        begin = toml.index("[tls]")
        standby.config.write_text(toml[:begin] + HEAD.replace("ca", "backup"))
        standby.processes[-1].send_signal(signal.SIGTERM)
        standby.processes[-1].wait()
        standby.start()
        wait_until(lambda: is_leader(standby))
        wait_until(lambda: cluster.is_running() and len(cluster.job()["members"]) == 3)
        cluster.wait_steps()
    recorded.check()
    ca(folder, "revoke", "user/alice", authority="backup")
    wait_until(lambda: status_by(cluster, standby) != 0)
    assert "agent/c" in [str(each.owner) for each in Authority.open(folder / "backup").issued()]


@pytest.mark.parametrize("cluster", [HEAD], indirect=True)
def test_a_standby_that_shares_the_authoritys_folder_enrols_nodes(cluster, store):
    head, standby = cluster.heads
    head.processes[-1].kill()
    wait_until(lambda: is_leader(standby))
    start_agents(cluster, store, "a")
    wait_until(lambda: standby.status()["nodes"] == {"ready": 1})
