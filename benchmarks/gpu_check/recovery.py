"""A cluster of one node: kill -9 of a rank and of the agent, and when steps go on."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.setting import ZONE, Setting
from sailord.local.paths import free_port

JOB = """
[model]
family = "llama"
layers = 4
hidden = {hidden}
heads = 4
ffn = {ffn}
vocab = 256
sequence = {sequence}

[training]
global_batch = 8
sequence = {sequence}
precision = "bf16"
steps = 1000000

[checkpoint]
memory_every = 5
"""
STEPS_BEFORE = 12
MEMORY_BYTES = 2**30
"""More than all snapshots of this job take."""
WITHIN_S = 60.0


class _Cluster:
    """sailord and one agent, each a process."""

    def __init__(self, folder: Path, memory: Path, setting: Setting) -> None:
        self.folder, self._processes = folder, {}
        kind, _ = setting.kind()
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_text(secrets.token_hex(32), encoding="ascii")
        pool = f'[[pool]]\nzone = "{ZONE}"\ngpu = "{kind}"\ngpus_per_machine = 1\ngpus = 1\n'
        (folder / "cluster.toml").write_text(pool, encoding="utf-8")
        (folder / "sailord.toml").write_text(
            'cluster_name = "check"\nstate = "head"\nkey = "key"\ncluster = "cluster.toml"\n'
            f'[listen]\nhost = "127.0.0.1"\nport = {free_port()}\n'
            "[options]\nstart_gather_s = 0.5\n",
            encoding="utf-8",
        )
        count = 1
        if setting.device == "cuda":
            import torch  # noqa: PLC0415 - counts devices and initialises none

            count = torch.cuda.device_count()
        emulate = "" if setting.device == "cuda" else f'emulate = "1x{kind}"\n'
        (folder / "agent").mkdir()
        (folder / "agent.toml").write_text(
            f'cluster_name = "check"\nname = "here"\nstate = "agent"\nkey = "key"\n{emulate}'
            f'store = "unix://{folder}/head/store.sock"\nzone = "{ZONE}"\n'
            f'machine = "{kind}x{count}"\nmemory = "{memory}"\norphan_s = 30.0\n'
            '[listen]\nhost = "127.0.0.1"\nport = 0\n',
            encoding="utf-8",
        )

    def start(self, name: str) -> None:
        """Start a daemon by its name."""
        module = {"sailord": "sailord.main", "agent": "agents.main"}[name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, "run", "--config", f"{self.folder}/{name}.toml"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "GCE_METADATA_HOST": "127.0.0.1:9", "TMPDIR": str(self.folder)},
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill a daemon, as a crash would."""
        self._processes[name].kill()
        self._processes[name].wait()

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines of steps, by time."""
        found = []
        for path in self.folder.glob("agent/process/*/output"):
            for line in path.read_bytes().splitlines():
                if line.startswith(b'{"job": ') and line.endswith(b"}"):
                    found.append(json.loads(line))
        return sorted((each for each in found if "loss" in each), key=lambda each: each["at"])

    def workers(self) -> list[int]:
        """Return the pids of the workers: the children of the fork server, which look like it."""
        parents = {}
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes()
                status = (entry / "stat").read_text(encoding="ascii", errors="replace")
            except OSError:
                continue
            if b"fork_server" in words and bytes(self.folder) in words:
                parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
        return sorted(pid for pid, parent in parents.items() if parent in parents)

    def why(self) -> str:
        """Return the ends of the logs."""
        tails = [path.read_text(errors="replace")[-400:] for path in self.folder.glob("*.log")]
        tails += [
            p.read_text(errors="replace")[-600:] for p in self.folder.glob("agent/process/*/output")
        ]
        return " | ".join(tails)

    def close(self) -> None:
        """End everything below this folder."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                except OSError:
                    continue
                if str(self.folder).encode() in words and int(entry.name) != os.getpid():
                    os.kill(int(entry.name), signal.SIGKILL)


def _memory() -> str | None:
    """Return where snapshots can be pinned, if it has room: in a container it may not."""
    shared = Path("/dev/shm")
    has_room = shared.is_dir() and shutil.disk_usage(shared).free >= MEMORY_BYTES
    return str(shared) if has_room else None


def run(setting: Setting) -> dict[str, Any]:
    """Start the cluster, train, kill, and look when the next step ends."""
    folder = Path(tempfile.mkdtemp(prefix="gc-", dir="/tmp"))
    memory = Path(tempfile.mkdtemp(prefix="gc-memory-", dir=_memory()))
    try:
        cluster = _Cluster(folder, memory, setting)
        try:
            return _measure(cluster, setting)
        finally:
            cluster.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def _measure(cluster: _Cluster, setting: Setting) -> dict[str, Any]:
    from sailord.client import Client, ServerProblem  # noqa: PLC0415 - needs more than torch

    hidden, sequence = (32, 16) if setting.is_quick else (512, 512)
    begin_s = time.monotonic()
    cluster.start("sailord")
    cluster.start("agent")
    client = Client(f"unix://{cluster.folder}/head/sailord.sock")

    def is_ready() -> bool:
        try:
            nodes = client.ask("GET", "/v1/nodes")["nodes"]
        except (ServerProblem, OSError):
            return False
        return any(node["state"] == "ready" for node in nodes)

    _wait(cluster, "a ready node", is_ready)
    found: dict[str, Any] = {"ready_s": time.monotonic() - begin_s}
    begin = time.time()
    job = JOB.format(hidden=hidden, ffn=2 * hidden, sequence=sequence)
    client.ask("POST", "/v1/jobs", {"job": job, "id": "check"})
    _wait(cluster, "steps", lambda: len(cluster.lines()) >= STEPS_BEFORE)
    lines = cluster.lines()
    found["submit_to_first_step_s"] = lines[0]["at"] - begin
    found["step_s"] = (lines[-1]["at"] - lines[1]["at"]) / (len(lines) - 2)
    found["kill_a_rank"] = _after(cluster, lambda: os.kill(cluster.workers()[-1], signal.SIGKILL))

    def restart() -> None:
        cluster.kill("agent")
        cluster.start("agent")

    found["kill_the_agent"] = _after(cluster, restart)
    return found


def _after(cluster: _Cluster, do: Callable[[], None]) -> dict[str, Any]:
    """Call ``do``, and return for how long no step ended."""
    before = cluster.lines()[-1]
    at = time.time()
    do()
    count = len(cluster.lines())
    _wait(cluster, "more steps", lambda: len(cluster.lines()) >= count + 8)
    # The longest time without a step since then: training may go on undisturbed.
    ends = [each for each in cluster.lines() if each["at"] >= before["at"]]
    gaps = [(b["at"] - a["at"], a, b) for a, b in pairwise(ends)]
    longest, last, first = max(gaps, key=lambda gap: gap[0])
    return {
        "without_a_step_s": longest,
        "steps_repeated": max(last["step"] - first["step"] + 1, 0),
        "new_generation": first["generation"] != last["generation"],
        "from_the_kill_s": first["at"] - at,
    }


def _wait(cluster: _Cluster, what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {WITHIN_S:g} s: {cluster.why()[-1500:]}")
        time.sleep(0.1)
