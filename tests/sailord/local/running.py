"""A launcher of a local cluster as a process, for tests that speak to it as people do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import cluster_pids
from sailord.client import Client, ServerProblem
from sailord.local.paths import LocalFolders
from tests.processes import SAILORCTL, wait_until

ROOT = Path(__file__).resolve().parents[3]
WITHIN_S = 60.0


def run_python(*words: object, cwd: Path = ROOT) -> str:
    """Run Python to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def told_by(module: str, *words: object) -> Any:
    """Return what a module beside this one prints last, as JSON, in a process of its own."""
    return json.loads(run_python("-m", f"tests.sailord.local.{module}", *words).splitlines()[-1])


def job_of(client: Client) -> dict[str, Any]:
    """Return the job that runs; before there is one, its step is 0."""
    found: dict[str, Any] = client.ask("GET", "/v1/status")["job"] or {"step": 0}
    return found


@dataclass(eq=False)
class Launched:
    """`sailorctl up`, and what it has started."""

    place: LocalFolders
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def client(self) -> Client:
        return Client(f"unix://{self.place.socket}")

    def job(self) -> dict[str, Any]:
        job = self.client.ask("GET", "/v1/status")["job"]
        assert job is not None
        return job

    def generation(self) -> int:
        """The generation that runs; 0 while none does."""
        job = self.job()
        runs = job["phase"]["name"] == "running" and job["generation"]
        return int(job["generation"]["number"]) if runs else 0

    def wait_for(self, holds: Callable[[], Any]) -> Any:
        def answered() -> Any:
            assert self.process.poll() is None, "the launcher ended"
            with contextlib.suppress(ServerProblem):
                return holds()

        try:
            return wait_until(answered, within_s=WITHIN_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None

    def told(self, *words: str) -> str:
        """What a command in the second terminal answers."""
        environment = {**os.environ, "SAILOR_SERVER": f"unix://{self.place.socket}"}
        done = subprocess.run(
            [*SAILORCTL, *words], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(WITHIN_S)

    def semaphores(self) -> set[Path]:
        """Those of Python's process pools: files in shared memory that outlive a killed process."""
        found = set()
        for pid in cluster_pids(self.place.folder):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                found |= {Path(line.split()[5]) for line in lines if "/dev/shm/sem." in line}
        return {path for path in found if path.exists()}


def launch(folder: Path, *, worker: str, words: tuple[str, ...] = ()) -> Launched:
    """Start a launcher."""
    meeting = folder.with_name("meeting")
    meeting.mkdir()
    log = folder.with_name("up.log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*SAILORCTL, "up", "--folder", str(folder), "--worker", worker, *words],
            cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "SAILOR_FAKE_MEETING": str(meeting)},
        )  # fmt: skip
    return Launched(LocalFolders(folder, port=0), log, process)
