"""The procedures of docs/security.md on a whole cluster under TLS, while a job trains."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.rpc.certificates import share_of_life_left
from agents.rpc.enrolment import LOOK_S, PATH
from agents.rpc.signing import REQUEST_HEADER, ClusterKey, sign_request
from sailord.authority import Authority
from tests.control.cluster import Cluster, is_leader
from tests.control.recording import recording
from tests.control.test_kill import has_new_agent, node_of
from tests.control.test_rebuild import lost_steps, move
from tests.processes import SAILORCTL, wait_until
from tests.sailord.daemon.running import ROOT, Place

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
NAMES = ("a", "b", "c")
LONG_S = 240.0
"""For what takes a minute by itself, on a busy machine."""


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    """A sailord with an authority, and nodes that enrol; the job runs on all of them."""
    Authority.create(tmp_path / "ca", "test")
    place = Place(tmp_path, webhooks='[tls]\nauthority = "ca"\n')
    made = Cluster(tmp_path, [place], agents_lease_s=30.0, agents_enrol=True)
    try:
        made.begin(*NAMES)
        yield made
    finally:
        made.end()


@contextlib.contextmanager
def training(cluster: Cluster) -> Iterator[None]:
    """Check at the end that no step was lost, and that the job still moves and trains."""
    with recording(cluster) as recorded:
        yield
        move(cluster, "c")
        move(cluster, "c", back=True)
        cluster.wait_steps()
    recorded.check()
    assert lost_steps(cluster) == []


def ca(cluster: Cluster, *words: str) -> None:
    """Run ``sailorctl ca`` as an operator does, on the folder of this name."""
    command, *options, folder = words
    where = "--folder", cluster.folder / folder
    subprocess.run([*SAILORCTL, "ca", command, *options, *where], cwd=ROOT, check=True)


def log_of(cluster: Cluster, name: str) -> str:
    return (cluster.folder / f"{name}.log").read_text(errors="replace")


# ---- the cluster's key ---------------------------------------------------------------------------


def answer_to(cluster: Cluster, key: str) -> int:
    """Return the status that sailord answers a request with that is signed with this key."""
    port = cluster.heads[0].port
    any_server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    any_server.check_hostname, any_server.verify_mode = False, ssl.CERT_NONE
    signed, _ = sign_request(
        ClusterKey("test", (key.encode(),)), f"127.0.0.1:{port}", "GET", PATH, b"", at=time.time()
    )
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=any_server)
    with contextlib.closing(connection):
        connection.request("GET", PATH, headers={REQUEST_HEADER: signed})
        return connection.getresponse().status


def write_key(path: Path, *lines: str) -> None:
    new = path.with_suffix(".new")
    new.touch(0o600)
    new.write_text("".join(f"{line}\n" for line in lines))
    new.rename(path)


def test_the_clusters_key_is_replaced_machine_by_machine(cluster):
    old, new = "k" * 64, "n" * 64
    with training(cluster):
        for number, lines in enumerate(((old, new), (new, old), (new,)), start=1):
            for name in ("head", *NAMES):
                path = cluster.folder / ("key" if name == "head" else f"{name}.key")
                write_key(path, *lines)
                wait_until(
                    lambda name=name, number=number: log_of(cluster, name).count(
                        "the cluster's key was read again"
                    ) == number
                )  # fmt: skip
                cluster.wait_steps()
            move(cluster, "a")
            move(cluster, "a", back=True)
    assert (answer_to(cluster, old), answer_to(cluster, new)) == (401, 200)


# ---- certificates --------------------------------------------------------------------------------


def test_a_node_is_shut_out_and_comes_back_reinstalled(cluster):
    revoked = cluster.folder / "ca" / "revoked.pem"
    with training(cluster):
        move(cluster, "c")
        ca(cluster, "revoke", "agent/c", "ca")
        wait_until(lambda: "the certificate is revoked" in log_of(cluster, "c"))
        for name in ("a", "b"):
            kept = cluster.folder / name / "tls" / "revoked.pem"
            wait_until(lambda kept=kept: kept.read_bytes() == revoked.read_bytes(), within_s=LONG_S)
        cluster.wait_steps()
        cluster.agents["c"].kill_node()
        shutil.rmtree(cluster.folder / "c")
        cluster.agents["c"].start()
        wait_until(lambda: "to let it return: sailorctl ca revoke" in log_of(cluster, "c"))
        ca(cluster, "revoke", "agent/c", "--may-return", "ca")
        wait_until(
            lambda: cluster.is_running() and sorted(cluster.job()["members"]) == sorted(NAMES),
            within_s=LONG_S,
        )


def test_certificates_are_renewed_before_they_expire(cluster):
    """Each process gets a certificate that ends soon; it renews that by itself."""
    authority, soon_s = Authority(cluster.folder / "ca", "test"), LOOK_S + 60.0
    own = next(each.owner.name for each in authority.issued() if each.owner.role == "sailord")
    members = [("sailord", own, "head"), *(("agent", name, name) for name in NAMES)]
    with training(cluster):
        for role, name, state in members:
            authority.issue(role, name, cluster.folder / state / "tls", days=soon_s / 86_400)
        ends = time.time() + soon_s
        for *_, state in members:
            path = cluster.folder / state / "tls" / "certificate.pem"
            wait_until(lambda path=path: share_of_life_left(path) > 0.9, within_s=LONG_S)
        wait_until(lambda: time.time() > ends, within_s=LONG_S)
        cluster.wait_steps()


# ---- the authority -------------------------------------------------------------------------------


def restart_head(cluster: Cluster) -> None:
    (head,) = cluster.heads
    head.processes[-1].send_signal(signal.SIGTERM)
    head.processes[-1].wait()
    head.start()
    wait_until(lambda: is_leader(head))


def restart_agent(cluster: Cluster, name: str) -> None:
    """Restart an agent without its workers."""
    agent = cluster.agents[name]
    node = wait_until(lambda: node_of(cluster, name))
    assert agent.process is not None
    agent.process.send_signal(signal.SIGINT)
    agent.process.wait(150)
    agent.start()
    wait_until(lambda: has_new_agent(cluster, node, -1), within_s=180)


def test_the_authority_is_replaced(cluster):
    folder, (head,) = cluster.folder, cluster.heads
    places = [folder / "ca" / "ca.pem", *(folder / f"{name}.ca.pem" for name in NAMES)]
    with training(cluster):
        ca(cluster, "init", "--cluster", "test", "ca2")
        old, new = places[0].read_bytes(), (folder / "ca2" / "ca.pem").read_bytes()
        for place in places:
            place.write_bytes(old + new)
            cluster.wait_steps()
        (folder / "ca2" / "ca.pem").write_bytes(new + old)
        head.config.write_text(head.config.read_text().replace('"ca"', '"ca2"'))
        shutil.rmtree(folder / "head" / "tls")
        restart_head(cluster)
        cluster.wait_steps()
        for name in NAMES:
            shutil.rmtree(folder / name / "tls")
            restart_agent(cluster, name)
            cluster.wait_steps()
        for place in (*places[1:], folder / "ca2" / "ca.pem"):
            place.write_bytes(new)
    assert [str(each.owner) for each in Authority(folder / "ca2", "test").issued()][1:] == [
        f"agent/{name}" for name in NAMES
    ]
    for name in ("head", *NAMES):
        assert "of another authority" not in log_of(cluster, name), "some were cut off meanwhile"
