"""A cluster: kill -9 of a rank, of an agent and of a node, and when steps go on.

Several GPUs are one node. Of one GPU, or none, three nodes are made, whose ranks share it.
"""

from __future__ import annotations

import contextlib
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

from benchmarks.gpu_check.setting import ZONE, Setting, attempt
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
global_batch = {batch}
sequence = {sequence}
precision = "{precision}"
steps = 1000000

[checkpoint]
memory_every = 5
"""
ELSEWHERE = {"GCE_METADATA_HOST": "127.0.0.1:9"}
"""An address where nothing answers, so that no metadata server is asked."""
STEPS_BEFORE = 12
MEMORY_BYTES = 2**30
"""Memory for snapshots, more than all snapshots of this job take."""
WITHIN_S = 40.0


class _Cluster:
    """sailord and an agent for each node, each a process."""

    def __init__(self, folder: Path, memory: Path, setting: Setting) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        kind, _ = setting.kind()
        count = 1
        if setting.device == "cuda":
            import torch  # noqa: PLC0415 - counts devices and initialises none

            count = torch.cuda.device_count()
        self.nodes = ["here"] if count > 1 else ["one", "two", "three"]
        gpus = count if count > 1 else len(self.nodes)
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_text(secrets.token_hex(32), encoding="ascii")
        pool = f'[[pool]]\nzone = "{ZONE}"\ngpu = "{kind}"\n'
        pool += f"gpus_per_machine = {count}\ngpus = {gpus}\n"
        (folder / "cluster.toml").write_text(pool, encoding="utf-8")
        (folder / "sailord.toml").write_text(
            'cluster_name = "check"\nstate = "head"\nkey = "key"\ncluster = "cluster.toml"\n'
            f'[listen]\nhost = "127.0.0.1"\nport = {free_port()}\n'
            "[options.testing]\nstart_gather_s = 0.5\n",
            encoding="utf-8",
        )
        emulate = "" if setting.device == "cuda" else f'emulate = "1x{kind}"\n'
        for node in self.nodes:
            (folder / node).mkdir()
            (memory / node).mkdir()
            (folder / f"{node}.toml").write_text(
                f'cluster_name = "check"\nname = "{node}"\nstate = "{node}"\nkey = "key"\n'
                f"{emulate}"
                f'store = "unix://{folder}/head/store.sock"\nzone = "{ZONE}"\n'
                f'machine = "{kind}x{count}"\nmemory = "{memory}/{node}"\norphan_s = 30.0\n'
                '[listen]\nhost = "127.0.0.1"\nport = 0\n',
                encoding="utf-8",
            )

    def start(self, name: str) -> None:
        """Start sailord, or the agent of a node."""
        module = "sailord.main" if name == "sailord" else "agents.main"
        # Ranks of one machine may not share a GPU under NCCL; those of several may.
        shares = {"NCCL_HOSTID": name, "NCCL_MNNVL_ENABLE": "0"} if len(self.nodes) > 1 else {}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, "run", "--config", f"{self.folder}/{name}.toml"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **shares, **ELSEWHERE, "TMPDIR": str(self.folder)},
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill a daemon, as a crash would."""
        self._processes[name].kill()
        self._processes[name].wait()

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines of steps, by time."""
        found = []
        for path in self.folder.glob("*/process/*/output"):
            for line in path.read_bytes().splitlines():
                if line.startswith(b'{"job": ') and line.endswith(b"}") and b'"loss"' in line:
                    found.append(json.loads(line))
        found.sort(key=lambda each: each["at"])
        # Each rank of the last stage says the same.
        once = {(each["generation"], each["step"]): each for each in reversed(found)}
        return sorted(once.values(), key=lambda each: each["at"])

    def workers(self, node: str = "") -> list[int]:
        """Return the pids of the workers: the children of fork servers, which look like them."""
        parents = self._fork_servers(self.folder / node)
        return sorted(pid for pid, parent in parents.items() if parent in parents)

    def kill_node(self, node: str) -> None:
        """Kill a node's agent and workers, as a loss of power would."""
        self.kill(node)
        for pid in self._fork_servers(self.folder / node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _fork_servers(self, folder: Path) -> dict[int, int]:
        """Return the fork servers below a folder and their children, each with its parent."""
        parents = {}
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes()
                status = (entry / "stat").read_text(encoding="ascii", errors="replace")
            except OSError:
                continue
            if b"fork_server" in words and bytes(folder) in words:
                parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
        return parents

    def why(self) -> str:
        """Return the ends of the logs."""
        tails = [path.read_text(errors="replace")[-20000:] for path in self.folder.glob("*.log")]
        tails += [
            p.read_text(errors="replace")[-6000:] for p in self.folder.glob("*/process/*/output")
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
            (setting.out / "recovery-logs.txt").write_text(cluster.why(), encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def _measure(cluster: _Cluster, setting: Setting) -> dict[str, Any]:
    from sailord.client import Client, ServerProblem  # noqa: PLC0415 - needs more than torch

    hidden, sequence = (32, 16) if setting.is_quick else (512, 512)
    begin_s = time.monotonic()
    cluster.start("sailord")
    for node in cluster.nodes:
        cluster.start(node)
    client = Client(f"unix://{cluster.folder}/head/sailord.sock")

    def is_ready() -> bool:
        try:
            nodes = client.ask("GET", "/v1/nodes")["nodes"]
        except (ServerProblem, OSError):
            return False
        return [node["state"] for node in nodes].count("ready") == len(cluster.nodes)

    _wait(cluster, "nodes that are ready", is_ready)
    found: dict[str, Any] = {"ready_s": time.monotonic() - begin_s}
    begin = time.time()
    precision = "bf16" if setting.device == "cuda" else "fp32"
    batch = 8 if setting.is_quick else 768  # So large that three GPUs are faster than one.
    job = JOB.format(
        hidden=hidden, ffn=2 * hidden, sequence=sequence, precision=precision, batch=batch
    )
    client.ask("POST", "/v1/jobs", {"job": job, "id": "check"})
    _wait(cluster, "steps", lambda: len(cluster.lines()) >= STEPS_BEFORE)
    lines = cluster.lines()
    found["submit_to_first_step_s"] = lines[0]["at"] - begin
    found["step_s"] = (lines[-1]["at"] - lines[1]["at"]) / (len(lines) - 2)
    found["ranks"] = len(cluster.workers())
    found["measured_schedule"] = attempt(lambda: _schedule(cluster, client, setting))
    found["kill_a_rank"] = attempt(
        lambda: _time_gap(cluster, lambda: os.kill(cluster.workers()[-1], signal.SIGKILL))
    )
    agent = cluster.nodes[0]

    def restart() -> None:
        cluster.kill(agent)
        cluster.start(agent)

    found["kill_the_agent"] = attempt(lambda: _time_gap(cluster, restart))
    # Wait until the agent is back, or the node killed next would be the second that is lost.
    log = cluster.folder / f"{agent}.log"
    _wait(cluster, "agent that is back", lambda: log.read_bytes().count(b'"registering"') > 1)
    if len(cluster.nodes) > 1:
        lost = [node for node in cluster.nodes if cluster.workers(node)][-1]
        found["kill_a_node"] = attempt(lambda: _time_gap(cluster, lambda: cluster.kill_node(lost)))
        found["ranks_after_it"] = len(cluster.workers())
        before = cluster.lines()[-1]["generation"]
        begin = time.time()
        cluster.start(lost)

        def until_used_s() -> float:
            """Wait for a step of a later generation."""
            _wait(cluster, "step", lambda: cluster.lines()[-1]["generation"] > before)
            return time.time() - begin

        if found["ranks"] > 1:
            found["node_is_used_again_s"] = attempt(until_used_s)
    found["losses_at_a_step_agree"] = _agree(cluster.lines())
    return found


def _schedule(cluster: _Cluster, client: Any, setting: Setting) -> dict[str, Any]:
    """Return what the ranks' own clocks say of one step; the rows of letters go to a file."""
    from sailord.text.schedule_text import schedule_text  # noqa: PLC0415 - the same as the client

    said: dict[str, Any] = {}

    def is_measured() -> bool:
        said.update(client.ask("GET", "/v1/jobs/check/timeline"))
        return said["measured"] is not None

    _wait(cluster, "measured step", is_measured)
    text = schedule_text(said)
    (setting.out / "recovery-schedule.txt").write_text(text + "\n", encoding="utf-8")
    measured = said["measured"]
    rows = [row for pipeline in measured["pipelines"] for row in pipeline["groups"]]
    length_s = measured["length_s"]
    return {
        "step_s": length_s,
        "predicted_step_s": said["timeline"]["iteration_s"],
        "rows": len(rows),
        "rows_without_times": sum(bool(row["why_none"]) for row in rows),
        "computing_share_of_each_row": [
            sum(end - begin for _, begin, end, *_ in row["passes"]) / length_s for row in rows
        ],
        "all_passes_are_inside_the_step": all(
            0 <= begin <= end <= length_s for row in rows for _, begin, end, *_ in row["passes"]
        ),
    }


def _agree(lines: list[dict[str, Any]]) -> str:
    """Compare the losses of steps that were done more than once, in several generations."""
    by_step: dict[int, list[float]] = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append(line["loss"])
    again = [losses for losses in by_step.values() if len(losses) > 1]
    far = max(((max(each) - min(each)) / abs(each[0]) for each in again), default=0.0)
    return f"{len(again)} steps done again, losses differ by {far:.1e} at most"


def _time_gap(cluster: _Cluster, do: Callable[[], None]) -> dict[str, Any]:
    """Call ``do``, and return for how long no step ended."""
    before = cluster.lines()[-1]
    at = time.time()
    do()
    count = len(cluster.lines())
    _wait(cluster, "more steps", lambda: len(cluster.lines()) >= count + 8)
    # Take the longest time without a step, since training may first go on undisturbed.
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
