"""Faults while a script's folder travels: agents and sailord killed, damage, a full disk.

``python -m tests.chaos.package_faults FOLDER`` submits a script for each fault, one after the
other, to a cluster of three nodes. Each job must be done in the end, trained by the files that were
submitted, after a whole setup on each member. What came of each is printed as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import kill_all
from sailord.client import ServerProblem
from tests.chaos.__main__ import MOUNTED, in_own_name_space
from tests.chaos.cluster import ChaosCluster, ChaosPlace, full, mount, unmount
from tests.chaos.net import Net, Proxies
from tests.processes import SAILORCTL, wait_for

MACHINES = (*(("large", "zone-a"),) * 2, ("large", "zone-b"))
NODE = "a1"
WITHIN_S = 150.0
CONTENT_BYTES = 3 << 20
DISK_BYTES = 64 << 20
OPTIONS = "unprepared_s = 20.0\n"
SCRIPT = """
import hashlib, sys
import torch
import sailor

content = open("content", "rb").read()
assert hashlib.sha256(content).hexdigest() == sys.argv[1], "other content travelled"
assert open("copied", "rb").read() == content, "the setup was cut off"
data = [(torch.ones(4) * index, torch.ones(4)) for index in range(96)]
sailor.Trainer(
    torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), data,
    loss=lambda out, batch: ((out - batch[1]) ** 2).mean(-1), batch_size=8, steps=int(sys.argv[2]),
).train()
"""
SETUP = "echo begun > begun; sleep 2; cat content > copied; echo set up"


@dataclass(frozen=True, slots=True)
class PackagePlace(ChaosPlace):
    """A place whose jobs are held soon if no node can be prepared."""

    def make(self) -> None:
        ChaosPlace.make(self)
        with (self.folder / "sailord.toml").open("a", encoding="utf-8") as file:
            file.write(OPTIONS)


@dataclass(eq=False)
class PackageFaults:
    """One cluster, and one job for each fault."""

    cluster: ChaosCluster
    folder: Path

    # ---- jobs -----------------------------------------------------------------------------------

    def submit(
        self, name: str, *, steps: int = 6, may_fail: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Submit a script with a folder of its own."""
        work = self.folder / name
        if not work.exists():
            work.mkdir()
            content = os.urandom(CONTENT_BYTES)
            (work / "train.py").write_text(SCRIPT)
            for each in ("content", "copied"):
                (work / each).write_bytes(content)
            (work / ".gitignore").write_text("copied\n")  # Nodes have that of their setup.
        sha = hashlib.sha256((work / "content").read_bytes()).hexdigest()
        words = [*SAILORCTL, "submit", str(work / "train.py")]
        words += ["--server", f"unix://{self.cluster.place.socket}", "--id", name]
        words += ["--setup", SETUP, "--", sha, str(steps)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert may_fail or done.returncode == 0, done.stderr
        return done

    def state(self, name: str) -> str:
        """Return the job's state; empty while no sailord answers."""
        try:
            return str(self.cluster.client.ask("GET", f"/v1/jobs/{name}")["state"])
        except ServerProblem:
            return ""

    def order(self, name: str, what: str) -> None:
        """Order something for a job."""
        self.cluster.client.ask("POST", f"/v1/jobs/{name}/{what}", {})

    def wait(self, what: str, holds: Callable[[], object]) -> None:
        """Wait until it holds."""
        told = partial(self.cluster.client.ask, "GET", "/v1/status")
        look = self.cluster.look_after
        wait_for(what, holds, within_s=WITHIN_S, told=told, meanwhile=look, every_s=0.05)

    def work(self, node: str) -> Path:
        """Return where a node keeps packages and unpacked folders."""
        return self.cluster.place.node(node) / "work"

    def has_begun(self, node: str) -> bool:
        """Return whether a setup has begun on the node and has not ended."""
        homes = self.work(node).glob("folders/*")
        return any(
            (home / "work" / "begun").exists() and not (home / "ready").exists() for home in homes
        )

    def why_unfit(self, node: str) -> str:
        """Return why the node cannot run the job."""
        try:
            return str(self.cluster.client.ask("GET", "/v1/status")["unsound"].get(node, ""))
        except ServerProblem:
            return ""

    # ---- faults ---------------------------------------------------------------------------------

    def agent_killed_while_it_fetches(self, name: str) -> None:
        """Kill an agent between two parts, twice."""
        self.cluster.arm(NODE, "fetching")
        self.submit(name)
        for is_last in (False, True):
            self.wait("nothing is fetched", lambda: not self.cluster.is_armed(NODE))
            if not is_last:
                self.cluster.arm(NODE, "fetching")
            self.cluster.start_agent(NODE)

    def agent_killed_in_a_setup(self, name: str) -> None:
        """Kill an agent while a command runs, which goes on."""
        self.submit(name)
        self.wait("no setup begins", lambda: self.has_begun(NODE))
        self.cluster.kill_agent(NODE)
        self.cluster.start_agent(NODE)

    def agent_killed_before_the_end(self, name: str) -> None:
        """Kill an agent when all is done but the mark."""
        self.cluster.arm(NODE, "prepared")
        self.submit(name)
        self.wait("no setup ends", lambda: not self.cluster.is_armed(NODE))
        self.cluster.start_agent(NODE)

    def leader_killed_while_it_serves(self, name: str) -> None:
        """Kill sailord while nodes fetch from it."""
        self.cluster.arm("sailord", "ServePart")
        self.submit(name)
        self.wait("nothing is served", lambda: not self.cluster.is_armed("sailord"))
        self.cluster.start_head()

    def leader_killed_in_an_upload(self, name: str) -> None:
        """Kill sailord while a folder is sent to it; the user submits again."""
        self.cluster.arm("sailord", "StorePart")
        failed = self.submit(name, may_fail=True)
        assert failed.returncode != 0, failed.stdout
        assert "Traceback" not in failed.stderr, failed.stderr
        assert not self.cluster.is_armed("sailord")
        self.cluster.start_head()
        self.wait("no leader", lambda: self.submit(name, may_fail=True).returncode == 0)

    def package_damaged_at_sailord(self, name: str) -> None:
        """Damage a part before any node has it; mend it once the job is held."""
        before = f"before-{name}"
        self.submit(before, steps=1_000_000)
        self.wait("it does not train", lambda: self.state(before) == "running")
        known = set(self.parts())
        self.submit(name)
        (damaged,) = (path for path in set(self.parts()) - known if path.name == "0001")
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        self.order(before, "cancel")
        self.wait("it is not held", lambda: self.state(name) == "held")
        damaged.write_bytes(content)
        self.order(name, "resume")

    def parts(self) -> list[Path]:
        """Return the parts of packages at sailord."""
        return list((self.cluster.place.folder / "head").rglob("packages/*/*"))

    def full_disk(self, name: str) -> None:
        """Fill the disk of one node, and free it once the job is done by the others."""
        with full(self.work(NODE)):
            self.submit(name)
            self.wait("the disk is not full", lambda: "No space left" in self.why_unfit(NODE))
            self.wait("the others do not train", lambda: self.state(name) == "done")

    def full_disks(self, name: str) -> None:
        """Fill all disks; free them and resume once the job is held."""
        with ExitStack() as stack:
            for node in self.cluster.nodes:
                stack.enter_context(full(self.work(node)))
            self.submit(name)
            self.wait("it is not held", lambda: self.state(name) == "held")
        self.order(name, "resume")

    # ---- all of them ----------------------------------------------------------------------------

    def run(self, name: str) -> dict[str, Any]:
        """Run one fault; return what came of its job."""
        begun = time.monotonic()
        getattr(self, name)(name.replace("_", "-"))
        job = name.replace("_", "-")
        self.wait(f"{job} does not end", lambda: self.state(job) == "done")
        history = self.cluster.client.ask("GET", f"/v1/jobs/{job}/history")["history"]
        return {
            "state": self.state(job),
            "held": [line["text"] for line in history if line["text"].startswith("held: ")],
            "failed": [line["text"] for line in history if " failed: " in line["text"]],
            "unfit": sorted({t["text"] for t in history if " cannot run it: " in t["text"]}),
            "seconds": round(time.monotonic() - begun, 1),
        }


FAULTS = (
    "agent_killed_while_it_fetches",
    "agent_killed_in_a_setup",
    "agent_killed_before_the_end",
    "leader_killed_while_it_serves",
    "leader_killed_in_an_upload",
    "package_damaged_at_sailord",
)
DISK_FAULTS = ("full_disk", "full_disks")
"""Only where each node can have a file system of its own."""


def main(folder: Path, names: list[str]) -> dict[str, Any]:
    """Run the faults of these names, or all."""
    inner = folder / "c"
    place = PackagePlace(inner, proxies=Proxies(Net(), inner, has_etcd=False))
    mounted: list[Path] = []
    try:
        cluster = ChaosCluster(place, MACHINES)
        with cluster:
            cluster.start()
            faults = PackageFaults(cluster, folder)
            has_disks = bool(os.environ[MOUNTED]) and _mount_disks(faults, mounted)
            chosen = names or [*FAULTS, *(DISK_FAULTS if has_disks else ())]
            found = {name: faults.run(name) for name in chosen}
            for each in mounted:
                unmount(each)
            return found
    finally:
        kill_all(inner)
        place.remove()


def _mount_disks(faults: PackageFaults, mounted: list[Path]) -> bool:
    """Give each node's work folder a file system of its own, if the system allows it."""
    for node in faults.cluster.nodes:
        work = faults.work(node)
        work.mkdir(exist_ok=True)
        try:
            mount("tmpfs", work, "tmpfs", 0, f"size={DISK_BYTES}")
        except OSError:
            return False
        mounted.append(work)
    return True


if __name__ == "__main__":
    if MOUNTED not in os.environ:
        in_own_name_space("tests.chaos.package_faults")
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:]), indent=1))
