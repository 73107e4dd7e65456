"""Jobs whose folders travel to a local cluster, with setup, secrets and faults; told as JSON.

``python -m tests.sailord.local.travel_cluster FOLDER``, a process of its own: a launcher adopts
orphans.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sailord.local.cluster import LocalCluster
from sailord.local.paths import LocalFolders
from sailord.text.node_text import nodes_text
from tests.agents.work.wheels import wheel
from tests.processes import SAILORCTL
from tests.sailord.local.running import ROOT

MACHINES = (*(("large", "zone-a"),) * 2, ("large", "zone-b"))
WITHIN_S = 120.0
SECRET = "the-value-of-the-secret"
SCRIPT = """
import os, sys
import torch
from torch import nn
import sailor
import tiny

version, bad, endless = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
assert tiny.VERSION == version, tiny.__file__
print("tiny", tiny.VERSION, "secret", len(os.environ["A_SECRET"]))
blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
model = nn.Sequential(*blocks, nn.Linear(8, 3))

class Data:
    def __len__(self):
        return 240

    def __getitem__(self, index):
        if index == bad:
            raise ValueError(f"sample {index} is damaged")
        return torch.ones(8) * (index if index < endless else float("inf")), index % 3

sailor.Trainer(
    model, Data(), batch_size=12, steps=20, shuffle=False,
    loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
).train()
"""
RECORDS = """
import time
from pathlib import Path
import torch
from torch import nn
import sailor

records = Path("corpus").read_text().splitlines()

class Data:
    def __len__(self):
        return len(records)

    def __getitem__(self, index):
        time.sleep(0.005)  # So that there is time to lose a node.
        return torch.ones(8) * float(records[index]), index % 3

blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
sailor.Trainer(
    nn.Sequential(*blocks, nn.Linear(8, 3)), Data(), batch_size=12, steps=2000,
    loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
).train()
"""
INSTALL = "pip install -q --no-index --no-deps ./*.whl"
FAILS_ON_B1 = 'case "$PWD" in */b1/*) echo no disk; exit 7;; esac'


class Travel:
    """One cluster, and the jobs that are submitted to it."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def submit(
        self, name: str, version: str, *options: str, bad: int = -1, endless: int = 240
    ) -> dict[str, Any]:
        """Submit a script in a folder of its own, which is deleted; return what became of it.

        Sample ``bad`` raises an error; those from ``endless`` on are infinite.
        """
        work, ours = self.folder / name, self.folder / f"{name}-installed"
        work.mkdir()
        ours.mkdir()
        (work / "train.py").write_text(SCRIPT)
        wheel(work, "tiny", version)
        (ours / "tiny.py").write_text(f"VERSION = {version!r}\n")
        subprocess.run(
            [
                *(*SAILORCTL, "submit", str(work / "train.py")),
                *("--server", f"unix://{self.cluster.place.socket}", "--id", name),
                *("--setup", INSTALL, "--secret", "A_SECRET", *options),
                *("--", version, str(bad), str(endless)),
            ],
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ours}"},
            stdout=sys.stderr,
        )
        shutil.rmtree(work)
        return self.ended(name)

    def shrink(self, name: str) -> dict[str, Any]:
        """Train on mounted records, lose most of them and then a node; return what became of it."""
        work, records = self.folder / name, self.folder / "records.txt"
        work.mkdir()
        lines = [f"{number / 240}\n" for number in range(240)]
        for path in (records, work / "corpus"):
            path.write_text("".join(lines))
        (work / "train.py").write_text(RECORDS)
        submit = ("submit", str(work / "train.py"), "--id", name, "--mount", f"corpus={records}")
        subprocess.run(self.sailorctl(*submit), check=True, cwd=ROOT, stdout=sys.stderr)
        end = time.monotonic() + WITHIN_S
        while (job := self.ask("/v1/status")["job"]) is None or job["step"] < 5:
            assert time.monotonic() < end, job
            self.cluster.look_after()
            time.sleep(0.1)
        records.write_text("".join(lines[:100]))
        self.cluster.kill_node(job["members"][-1])
        return self.ended(name)

    def sailorctl(self, *words: str) -> list[str]:
        server = f"unix://{self.cluster.place.socket}"
        return [*SAILORCTL, *words, "--server", server]

    def ended(self, name: str) -> dict[str, Any]:
        """Wait until the job has ended or is held; return what a user sees of it."""
        end, seen = time.monotonic() + WITHIN_S, ""
        while (job := self.ask(f"/v1/jobs/{name}"))["state"] in ("queued", "running"):
            assert time.monotonic() < end, job
            self.cluster.look_after()
            nodes = self.ask("/v1/nodes")["nodes"]
            if not seen and any("exited with" in str(node) for node in nodes):
                # A command of its own is too slow: on a busy machine the job may end before it
                # asks.
                seen = nodes_text(nodes)
            time.sleep(0.1)
        names = [node["name"] for node in self.ask("/v1/nodes")["nodes"]]
        # What happened is stored a moment after the state is shown.
        while not (history := self.history(name))[-1].startswith(job["state"]):
            assert time.monotonic() < end, history
            time.sleep(0.1)
        return {
            "seen": seen,
            "state": job["state"],
            "reason": job["reason"],
            "history": history,
            "members": job["generation"]["members"],
            "step": job["step"],
            "logs": {node: self.log(node) for node in names},
        }

    def history(self, name: str) -> list[str]:
        return [line["text"] for line in self.ask(f"/v1/jobs/{name}/history")["history"]]

    def ask(self, path: str) -> Any:
        return self.cluster.client.ask("GET", path)

    def log(self, node: str, which: str = "") -> str:
        return self.cluster.client.log(node, None, "", which)[0]


def main(folder: Path) -> dict[str, Any]:
    """Run five jobs: with a setup that fails on a node, of another version, one that raises, one
    whose steps become non-finite, one whose data shrinks."""
    os.environ["A_SECRET"] = SECRET
    with LocalCluster(LocalFolders(folder / "c"), MACHINES) as cluster:
        cluster.start()
        travel = Travel(cluster, folder)
        one = travel.submit("one", "1.0", "--setup", FAILS_ON_B1)
        setup = {n: travel.log(n, "setup") for n in ("a1", "b1")}
        two = travel.submit("two", "2.0")
        raises = travel.submit("raises", "2.0", bad=17 * 12 + 5)
        # A held job whose last steps are in memory keeps the cluster.
        subprocess.run(travel.sailorctl("cancel", "raises"), check=True, stdout=sys.stderr)
        diverges = travel.submit("diverges", "2.0", endless=10 * 12)
        subprocess.run(travel.sailorctl("cancel", "diverges"), check=True, stdout=sys.stderr)
        shrinks = travel.shrink("shrinks")
        texts = [path.read_text(errors="replace") for path in (folder / "c").glob("*.log")]
        texts += [path.read_text(errors="replace") for path in (folder / "c").rglob("*.json")]
        return {
            "one": one,
            "two": two,
            "raises": raises,
            "diverges": diverges,
            "shrinks": shrinks,
            "setup": setup,
            "leaks": sum(SECRET in text for text in texts),
        }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
