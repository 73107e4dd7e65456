"""`sailorctl up` as a person uses it: it trains, is disturbed, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agents.daemon.process_cleanup import MARK, cluster_pids, kill_all, mark
from sailord.client import ServerProblem
from sailord.local.cluster import LocalCluster
from sailord.local.control_client import ask
from sailord.local.paths import LocalFolders
from simulator.documents.problems import InputError
from tests.processes import SAILORCTL, left_behind, wait_until
from tests.sailord.local.running import Launched, launch

WORKER = "worker.control.worker_process"


def ports_of(up: Launched) -> set[int]:
    nodes = up.client.ask("GET", "/v1/nodes")["nodes"]
    leader = up.client.ask("GET", "/v1/status")["leader"]["address"]
    return {int(at.rpartition(":")[2]) for at in (leader, *(node["address"] for node in nodes))}


def is_open(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_cluster_is_disturbed_and_ended(folder):
    up = launch(folder, worker=WORKER)
    try:
        up.wait_for(lambda: up.generation() == 1 and up.job()["step"] > 0)
        ports = ports_of(up)
        assert len(ports) == 9
        assert all(map(is_open, ports))
        assert len(up.client.ask("GET", "/v1/nodes")["nodes"]) == 8

        assert "in 1.0 s" in up.told("preempt", "c2", "--notice", "1")
        up.wait_for(lambda: "the node is preempted" in up.log.read_text())
        # On a slow machine the node goes before all is read from it, which takes one more.
        generation = up.wait_for(lambda: (found := up.generation()) > 1 and found)

        before = set(cluster_pids(folder))
        assert up.told("local", "kill", "a2", "--folder", str(folder)).startswith("a2 is killed")
        assert f"with SAILOR_SERVER=unix://{up.place.socket}" in up.log.read_text()
        assert len(before - set(cluster_pids(folder))) >= 3, "agent, fork server and worker"
        assert not (up.place.memory / "a2").exists()
        up.wait_for(lambda: up.generation() > generation)

        told = up.told("local", "add", "large@zone-b", "--folder", str(folder))
        assert told.startswith("b3 is starting")
        up.wait_for(lambda: "b3 could help" in up.log.read_text())

        ports, semaphores = ports | ports_of(up), up.semaphores()
        assert semaphores, "sailord's planner has some"
        assert up.end() == 0
        assert [path for path in semaphores if path.exists()] == []
        assert left_behind(up.place) == []
        assert not any(map(is_open, ports))
    finally:
        up.process.kill()
        up.process.wait()


@pytest.mark.slow
def test_killed_services_are_restarted_and_training_continues(folder):
    up = launch(folder, worker=WORKER)
    try:
        up.wait_for(lambda: up.generation() == 1 and up.job()["step"] > 0)
        for module, told in (
            ("sailord.main", "sailord was killed by SIGKILL and is restarted"),
            ("agents.main", "was killed by SIGKILL and is restarted"),
        ):
            pid = next(pid for pid in cluster_pids(folder) if module in command_of(pid))
            os.kill(pid, signal.SIGKILL)
            up.wait_for(lambda told=told: told in up.log.read_text())
            step = up.wait_for(lambda: up.job()["step"])
            up.wait_for(lambda step=step: up.job()["step"] > step + 2)
        up.wait_for(lambda: len(up.client.ask("GET", "/v1/status")["job"]["members"]) == 8)
        assert up.generation() == 1, "no worker was touched"
        assert up.end() == 0
        assert left_behind(up.place) == []
    finally:
        up.process.kill()
        up.process.wait()


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.slow
def test_guard_cleans_up_after_a_killed_launcher(folder):
    up = launch(folder, worker=WORKER)
    try:
        up.wait_for(lambda: up.generation() == 1)
        assert len(cluster_pids(folder)) >= 26, "per node an agent, a fork server and a worker"
        semaphores = up.semaphores()
        assert semaphores
        up.end(signal.SIGKILL)
        wait_until(lambda: left_behind(up.place) == [], within_s=30.0)
        assert [path for path in semaphores if path.exists()] == []
    finally:
        up.process.kill()
        up.process.wait()


def test_one_cluster_at_a_time(folder):
    first = LocalFolders(folder, port=0)
    second = subprocess.run(
        [sys.executable, "-c", TAKES_PLACE, str(folder)], capture_output=True, text=True, check=True
    )
    assert second.stdout == "taken\n"
    assert not first.folder.exists()


TAKES_PLACE = """
import sys
from pathlib import Path
from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from simulator.documents.problems import InputError
one, two = (LocalCluster(LocalFolders(Path(sys.argv[1]), "none", 0)) for _ in range(2))
one.claim()
try:
    two.claim()
except InputError as error:
    assert "another cluster runs there" in str(error)
    print("taken")
one.close()
"""


def test_the_guard_of_a_killed_launcher_spares_the_next_cluster(folder):
    killed = subprocess.run(
        [sys.executable, "-c", IS_KILLED, str(folder)], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    after = LocalCluster(LocalFolders(folder, "none", 0))
    after.claim()
    try:
        guard = Path("/proc", killed.stdout.strip())
        wait_until(lambda: not guard.exists() or not (guard / "cmdline").read_bytes())
        assert (folder / "sailord.toml").exists()
    finally:
        after.close()


IS_KILLED = """
import os, signal, sys
from pathlib import Path
from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
cluster = LocalCluster(LocalFolders(Path(sys.argv[1]), "none", 0))
cluster.claim()
guard = cluster._run("guard", "sailord.local.guard", sys.argv[1], is_marked=False)
print(guard.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_that_is_no_cluster_is_never_touched(folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    done = subprocess.run(
        [*SAILORCTL, "up", "--folder", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "exists, and is not a local cluster's folder" in done.stderr
    assert done.stdout == "", "nothing was started, and nothing is ended"
    assert (folder / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in folder.parent.iterdir()] == ["c"]
    LocalFolders(folder, port=0).remove()
    assert (folder / "thesis.tex").exists()


def test_forked_processes_are_found_by_their_mark(tmp_path):
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **mark(tmp_path)}, check=True)
    wait_until(lambda: cluster_pids(tmp_path))
    assert kill_all(tmp_path) == []
    assert cluster_pids(tmp_path) == []


def test_cleanup_spares_processes_of_other_clusters(tmp_path):
    other = {**os.environ, MARK: f"{tmp_path}-other"}
    stranger = subprocess.Popen(["sleep", "60"], env=other)
    try:
        kill_all(tmp_path)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_mistakes_are_reported(folder):
    with pytest.raises(ServerProblem, match="start one with sailorctl up"):
        ask(folder / "up.sock", {"ask": "add"})
    long = Path(tempfile.gettempdir()) / ("x" * 90)
    with pytest.raises(InputError, match="too long for the paths"):
        LocalFolders(long, port=0).make()
    with pytest.raises(InputError, match="'#', which the addresses of its sockets cannot hold"):
        LocalFolders(Path(tempfile.gettempdir()) / "a#1", port=0).make()
