"""`sailorctl up --zones`: real nodes in network namespaces, of which nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agents.daemon.namespaces import enter_network_namespace
from sailord.local.shaped_network import TUN, NodeAddress, ShapedNetwork
from sailord.local.zone_file import EmulatedLink, load_zones
from simulator.hardware.catalogue import load_catalogue
from simulator.network.network_file import network_from_json
from tests.processes import SAILORCTL, left_behind, wait_until
from tests.sailord.local.running import ROOT, launch

ZONES = ROOT / "examples/zones.toml"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not TUN.exists() or shutil.which("ip") is None,
    reason="network namespaces need root, /dev/net/tun and ip",
)


def namespaces() -> set[str]:
    """All network namespaces that a process is in."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


@pytest.fixture
def network():
    command = [sys.executable, "-m", "sailord.local.router"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        made = ShapedNetwork(load_zones(ZONES), process)
        made.begin()
        yield made
        process.stdin.close()


def listen_at(site: NodeAddress) -> socket.socket:
    """A listening socket in a node's namespace; the thread that opened it stays there."""
    opened: list[socket.socket] = []

    def open_() -> None:
        enter_network_namespace(site.namespace)
        opened.append(socket.create_server((site.address, 5000)))

    thread = threading.Thread(target=open_)
    thread.start()
    thread.join()
    return opened[0]


def connect_from(site: NodeAddress, address: str) -> socket.socket:
    """A connection from a node's namespace to an address of the network."""
    opened: list[socket.socket] = []

    def open_() -> None:
        enter_network_namespace(site.namespace)
        opened.append(socket.create_connection((address, 5000), timeout=20.0))

    thread = threading.Thread(target=open_)
    thread.start()
    thread.join()
    return opened[0]


@needs_root
def test_packets_wait_for_the_delay_both_ways(network):
    one, other = network.add_node("a1", "zone-a"), network.add_node("c1", "zone-c")
    with listen_at(other) as listener, connect_from(one, other.address) as client:
        server, _ = listener.accept()
        with server:
            begun = time.monotonic()
            client.sendall(b"?")
            assert server.recv(1) == b"?"
            server.sendall(b"!")
            assert client.recv(1) == b"!"
            assert time.monotonic() - begun >= 0.030, "15 ms each way"
    assert network.bytes_sent()["a1", "c1"] > 0


@needs_root
def test_link_that_is_down_carries_nothing_until_it_is_back(network):
    one, other = network.add_node("a1", "zone-a"), network.add_node("b1", "zone-b")
    with listen_at(other) as listener, connect_from(one, other.address) as client:
        server, _ = listener.accept()
        with server:
            network.set_link("zone-a", "zone-b", EmulatedLink(), is_down=True)
            before = network.bytes_sent()["a1", "b1"]
            client.sendall(b"?")
            assert network.bytes_sent()["a1", "b1"] == before
            network.set_link("zone-a", "zone-b", EmulatedLink())
            server.settimeout(20.0)
            assert server.recv(1) == b"?", "TCP sends it again"


@needs_root
def test_removed_node_is_cut_off_and_its_namespace_ends(network):
    before = namespaces()
    site = network.add_node("a1", "zone-a")
    with subprocess.Popen(["nsenter", f"--net={site.namespace}", "sleep", "60"]) as within:
        wait_until(lambda: namespaces() - before)
        network.remove_node("a1")
        assert not Path(site.namespace).exists()
        within.kill()
    wait_until(lambda: namespaces() == before)


def test_without_root_zones_are_refused(tmp_path):
    words = [*SAILORCTL, "up", "--zones", str(ZONES), "--folder", str(tmp_path / "c")]
    if os.geteuid() == 0:
        words = ["setpriv", "--reuid=65534", "--clear-groups", *words]
        tried = [*words[:3], *SAILORCTL, "--help"]
        if subprocess.run(tried, cwd=ROOT, capture_output=True, check=False).returncode != 0:
            pytest.skip("the user nobody cannot read this folder")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "zones: need root" in done.stderr
    assert "Traceback" not in done.stderr


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.at_length), signal.SIGKILL],
    ids=["interrupted", "killed"],
)
def test_job_trains_across_namespaces_and_nothing_is_left(folder, number):
    before = namespaces()
    words = ("--zones", str(ZONES))
    up = launch(folder, worker="worker.control.worker_process", words=words)
    try:
        up.wait_for(lambda: up.generation() == 1 and up.job()["step"] > 0)
        hosts = [
            node["address"].rpartition(":")[0]
            for node in up.client.ask("GET", "/v1/nodes")["nodes"]
        ]
        assert sorted(hosts) == [f"10.77.0.{number}" for number in range(2, 6)]
        assert len(namespaces() - before) == 5, "four nodes and the head"
        told = up.told("local", "link", "zone-a", "zone-c", "--down", "--folder", str(folder))
        assert told == "the link between zone-a and zone-c is down\n"
        assert up.told("local", "kill", "b1", "--folder", str(folder)).startswith("b1 is killed")
        up.wait_for(lambda: len(namespaces() - before) == 4)
        up.end(number)
        wait_until(lambda: left_behind(up.place) == [], within_s=30.0)
        wait_until(lambda: namespaces() <= before)
    finally:
        up.process.kill()
        up.process.wait()


TWO = """
[[zone]]
name = "zone-a"

[[zone]]
name = "zone-b"

[[link]]
from = "zone-a"
to = "zone-b"
delay_ms = 10
mbit_per_s = 80
"""


@needs_root
@pytest.mark.at_length
def test_profiler_finds_delay_and_rate_within_a_tenth(folder):
    file = folder.with_name("two.toml")
    file.write_text(TWO)
    words = ("--zones", str(file), "--idle")
    up = launch(folder, worker="worker.control.worker_process", words=words)
    out = folder.with_name("network.json")
    try:
        up.wait_for(lambda: "Ctrl-C here" in up.log.read_text())
        told = up.told("profile", "network", "--out", str(out))
        assert "emulated-large@zone-a  emulated-large@zone-b" in told
        for link in up.client.ask("GET", "/v1/network")["links"]:
            assert link["round_trip_s"] == pytest.approx(0.020, rel=0.1)
            if not link["both_ways"]:
                assert link["bytes_per_s"] == pytest.approx(10e6, rel=0.1)
        catalogue = load_catalogue(folder / "catalogue.toml")
        document = json.loads(out.read_text())
        network = network_from_json(document, place="network.json", catalogue=catalogue)
        ends = [(f"zone-{x}", "emulated-large") for x in "ab"]
        assert set(network.between) == {(ends[0], ends[1]), (ends[1], ends[0])}

        up.told("local", "link", "zone-a", "zone-b", "--down", "--folder", str(folder))
        up.client.ask("POST", "/v1/network")
        up.wait_for(lambda: up.client.ask("GET", "/v1/network")["failures"])
        link = ("--delay-ms", "10", "--mbit-per-s", "80", "--folder", str(folder))
        up.told("local", "link", "zone-a", "zone-b", *link)
        up.wait_for(lambda: not up.client.ask("GET", "/v1/network")["is_measuring"])
        links = up.client.ask("GET", "/v1/network")["links"]
        assert {link["measurements"] for link in links} == {2}
        up.end()
    finally:
        up.process.kill()
        up.process.wait()
