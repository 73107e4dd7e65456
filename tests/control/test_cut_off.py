"""An agent that cannot reach the store keeps its workers while they make steps."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from tests.control.cluster import Agent, Cluster
from tests.control.recording import recording
from tests.processes import carry, wait_until
from tests.sailord.daemon.running import Place

pytestmark = pytest.mark.slow


class CuttableProxy:
    """A proxy to a Unix socket that can be cut and restored."""

    def __init__(self, path: Path, to: Path) -> None:
        self.path, self.to = path, to
        self.lines: list[socket.socket] = []
        self.restore()

    def restore(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen()
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        self.path.unlink()
        for line in (self.listener, *self.lines):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        self.lines.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = listener.accept()[0], socket.socket(socket.AF_UNIX)
                self.lines += [near, far]
                far.connect(str(self.to))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()


@pytest.fixture
def cluster(tmp_path):
    """Two nodes, of which b reaches the store through a proxy."""
    # The leader must wait longer than the agent's `park_s`.
    made = Cluster(tmp_path, [Place(tmp_path, options="suspect_s = 12.0\n")])
    yield made
    made.end()


@pytest.fixture
def proxy(cluster, tmp_path):
    """The proxy of b, while the job runs on both nodes."""
    cluster.heads[0].start()
    wait_until(lambda: cluster.heads[0].ask("GET", "/readyz")[0] == 200)
    made = CuttableProxy(tmp_path / "way.sock", tmp_path / "head" / "store.sock")
    cluster.agents["b"] = Agent(tmp_path, "b", f"unix://{made.path}?timeout_s=0.5")
    cluster.agents["b"].start()
    cluster.begin("a", heads=False)
    yield made
    made.cut()


def state_of(cluster: Cluster, name: str) -> str:
    nodes = cluster.head.ask("GET", "/v1/nodes")[1]["nodes"]
    return next((node["state"] for node in nodes if node["name"] == name), "gone")


def test_workers_survive_a_partition_while_they_make_steps(cluster, proxy):
    workers = cluster.workers()
    with recording(cluster) as recorded:
        proxy.cut()
        wait_until(lambda: state_of(cluster, "b") == "suspect")
        for _ in range(5):  # Longer than `PARK_S`, after which stalled workers are parked.
            cluster.wait_steps(20)
        assert cluster.workers() == workers
        proxy.restore()
        wait_until(lambda: state_of(cluster, "b") == "ready")
        cluster.wait_steps()
    recorded.check()
    assert cluster.workers() == workers
    assert recorded.records[-1].number == 1


def test_stalled_workers_are_parked_and_never_roll_back(cluster, proxy):
    old = cluster.workers()
    proxy.cut()
    wait_until(lambda: state_of(cluster, "b") == "suspect")
    os.kill(next(iter(old["a"].values())), signal.SIGSTOP)  # No step ends any more.
    wait_until(lambda: "cut off from the store" in (cluster.folder / "head.log").read_text())
    wait_until(lambda: cluster.is_running() and cluster.job()["members"] == ["a"])
    proxy.restore()
    wait_until(lambda: state_of(cluster, "b") == "ready")
    cluster.wait_steps()
    assert cluster.count()[0] > 1
    assert cluster.agents["b"].count()[0] in {1, cluster.count()[0]}
