"""Records a storm: the store's changes, processes, snapshots, steps.

Everything is written to files as it happens, so that the checker can run again on a recording.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import glob
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.protocol.codec import decode
from agents.protocol.records import Durable, JobId, Point
from agents.protocol.store_keys import Keys
from agents.workers.pidfd import process_start
from sailord.checkpoints.manifest import folder_of, load_manifest
from sailord.checkpoints.object_storage import open_storage
from sailord.checkpoints.verify import faults_of
from sailord.client import ServerProblem
from tests.chaos.cluster import ChaosCluster
from tests.control.recording import follow_store
from worker.checkpoint.snapshot_file import SnapshotError, read_header

KEYS = Keys("local")
SAMPLE_S = 0.4


@dataclass(eq=False)
class Recorder:
    """Observes a cluster until ended."""

    cluster: ChaosCluster
    folder: Path
    job: JobId
    ended: threading.Event = field(default_factory=threading.Event)
    begun: Point | None = None
    """The restore point of the current generation."""
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Start the observing threads."""
        for work in (self._follow_store, self._sample, self._follow_failures):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """End the observing threads."""
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def write(self, name: str, line: dict[str, Any]) -> None:
        """Append a line to the file of this name."""
        with (self.folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    # ---- the store ------------------------------------------------------------------------------

    def _follow_store(self) -> None:
        asyncio.run(follow_store(self.cluster.store, KEYS.all, self.ended, self._note_change))

    def _note_change(self, revision: int, key: str, entry: Any) -> None:
        line: dict[str, Any] = {"revision": revision, "at": time.time(), "key": key}
        if entry is not None:
            line["created"] = entry.created
            try:
                line["value"] = json.loads(entry.value)
            except ValueError:
                line["value"] = base64.b64encode(entry.value).decode()
        self.write("changes", line)
        if entry is not None and KEYS.job_part(key) == (self.job, "gen"):
            point = line["value"]["restore"]["point"]
            self.begun = Point(point["step"], point["generation"])
        if entry is not None and KEYS.job_part(key) == (self.job, "durable"):
            self._check_durable(decode(Durable, entry.value))

    def _check_durable(self, durable: Durable) -> None:
        """Read every byte of the checkpoint that was just committed."""
        storage = open_storage(f"file://{self.cluster.durable}")
        name = f"{folder_of(self.job, durable.point)}/{durable.manifest.rpartition('/')[2]}"
        try:
            manifest = load_manifest(storage, name)
            faults = faults_of(storage, manifest, job=self.job, is_thorough=True)
        except Exception as error:
            faults = [f"{type(error).__name__}: {error}"]
        point = durable.point
        line = {"step": point.step, "generation": point.generation, "faults": faults}
        self.write("commits", {"at": time.time(), **line})

    # ---- failures -------------------------------------------------------------------------------

    def _follow_failures(self) -> None:
        known = None
        while not self.ended.wait(SAMPLE_S):
            with contextlib.suppress(ServerProblem):
                job = self.cluster.client.ask("GET", "/v1/status")["job"]
                count = known if job is None else job["failures"]
                if count is not None and count != known:
                    known = count
                    self.write("failures", {"at": time.time(), "count": count})

    # ---- processes and snapshots ----------------------------------------------------------------

    def _sample(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            self.write("samples", {
                "at": time.time(),
                "workers": {name: self._workers(name) for name in list(self.cluster.nodes)},
                "snapshots": list(self._snapshots()),
            })  # fmt: skip

    def _workers(self, name: str) -> list[list[int]]:
        """Return pid and start time of a node's recorded workers that live."""
        found = []
        pattern = f"{self.cluster.place.node(name)}/process/*/process.json"
        for path in map(Path, glob.glob(pattern)):
            with contextlib.suppress(OSError, ValueError, KeyError):
                said = json.loads(path.read_text(encoding="utf-8"))
                if process_start(said["pid"]) == said["start"]:
                    found.append([said["pid"], said["start"]])
        return sorted(found)

    def _snapshots(self) -> Iterator[dict[str, Any]]:
        """Yield all sealed snapshot files, with the checksums of their pieces."""
        pattern = f"{self.cluster.place.memory}/*/{self.job}/*/*.snap"
        for path in map(Path, glob.glob(pattern)):  # Path.glob fails if a folder goes meanwhile.
            try:
                header = read_header(path)
            except (OSError, SnapshotError):
                continue  # Removed or overwritten meanwhile.
            progress = header.progress
            yield {
                "holder": path.parts[-4],
                "writer": header.node,
                "rank": header.rank,
                "generation": header.generation,
                "step": header.step,
                "keys": header.layers * (header.atoms + 1),
                "pieces": {f"{p.layer}.{p.piece}": p.checksum for p in header.pieces},
                "samples": progress.samples,
                "label_tokens": progress.label_tokens,
            }


def read_steps(folder: Path, job: str) -> Iterator[dict[str, Any]]:
    """Yield every line that a worker of any node wrote at the end of a step."""
    for path in folder.glob("*/process/*/output"):
        node = path.parts[-4]
        for line in path.read_bytes().splitlines():
            if line.startswith(b'{"job": ') and line.endswith(b"}"):
                said = json.loads(line)
                if said["job"] == job:
                    yield {**said, "node": node}
