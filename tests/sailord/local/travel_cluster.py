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
from sailord.local.paths import Place
from tests.agents.work.wheels import wheel
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

version, bad = sys.argv[1], int(sys.argv[2])
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
        return torch.ones(8) * index, index % 3

sailor.Trainer(
    model, Data(), batch_size=12, steps=20, shuffle=False,
    loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
).train()
"""
INSTALL = "pip install -q --no-index --no-deps ./*.whl"
FAILS_ON_B1 = 'case "$PWD" in */b1/*) echo no disk; exit 7;; esac'


class Travel:
    """One cluster, and the jobs that are submitted to it."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def submit(self, name: str, version: str, bad: int, *options: str) -> dict[str, Any]:
        """Submit a script in a folder of its own, which is deleted; return what became of it."""
        work, ours = self.folder / name, self.folder / f"{name}-installed"
        work.mkdir()
        ours.mkdir()
        (work / "train.py").write_text(SCRIPT)
        wheel(work, "tiny", version)
        (ours / "tiny.py").write_text(f"VERSION = {version!r}\n")
        subprocess.run(
            [
                *(sys.executable, "-m", "sailord.cli.main", "submit", str(work / "train.py")),
                *("--server", f"unix://{self.cluster.place.socket}", "--id", name),
                *("--setup", INSTALL, "--secret", "A_SECRET", *options, "--", version, str(bad)),
            ],
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ours}"},
            stdout=sys.stderr,
        )
        shutil.rmtree(work)
        end = time.monotonic() + WITHIN_S
        while (job := self.ask(f"/v1/jobs/{name}"))["state"] in ("queued", "running"):
            assert time.monotonic() < end, job
            self.cluster.look_after()
            time.sleep(0.1)
        return {
            "state": job["state"],
            "reason": job["reason"],
            "history": [line["text"] for line in self.ask(f"/v1/jobs/{name}/history")["history"]],
            "members": job["generation"]["members"],
            "logs": {node: self.ask(f"/v1/nodes/{node}/logs") for node in ("a1", "a2", "b1")},
        }

    def ask(self, path: str) -> Any:
        return self.cluster.client.ask("GET", path)


def main(folder: Path) -> dict[str, Any]:
    """Run three jobs: with a setup that fails on a node, of another version, one that raises."""
    os.environ["A_SECRET"] = SECRET
    with LocalCluster(Place(folder / "c"), MACHINES) as cluster:
        cluster.start()
        travel = Travel(cluster, folder)
        one = travel.submit("one", "1.0", -1, "--setup", FAILS_ON_B1)
        setup = {n: travel.ask(f"/v1/nodes/{n}/logs?setup=true") for n in ("a1", "b1")}
        two = travel.submit("two", "2.0", -1)
        raises = travel.submit("raises", "2.0", 17 * 12 + 5)
        travel.ask("/v1/status")
        texts = [path.read_text(errors="replace") for path in (folder / "c").glob("*.log")]
        texts += [path.read_text(errors="replace") for path in (folder / "c").rglob("*.json")]
        return {
            "one": one,
            "two": two,
            "raises": raises,
            "setup": setup,
            "leaks": sum(SECRET in text for text in texts),
        }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
