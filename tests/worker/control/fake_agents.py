"""The agents of several nodes in one object, reduced to what workers need.

Workers are forked by the real fork server. Snapshots are served to other nodes over HTTP.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from simulator.inputs.job_file import load_job
from simulator.inputs.plan_file import plan_text
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.local_http import LocalServer, QuietHandler
from tests.worker.training_runs import alone, trained
from worker.checkpoint import snapshot_file
from worker.data.sources.open_data import open_data
from worker.layout.rank_layout import rank_places

WAIT_S = 20.0
Status = dict[str, Any]


def plan_of(*pipelines: tuple[int, list[tuple[int, int, int, str]]], microbatch: int = 1) -> Plan:
    """Build a plan from (micro batches, [(first layer, end, TP degree, node), ...])."""
    return Plan(
        microbatch,
        tuple(
            Pipeline(
                count,
                tuple(
                    Stage((first, end), tp, (Place("cpu", "m", "z", node=node),))
                    for first, end, tp, node in stages
                ),
            )
            for count, stages in pipelines
        ),
    )


def uninterrupted_losses(folder: Path, job_text: str, *, steps: int) -> list[float]:
    """Return the losses of an uninterrupted run by the sailor engine on one rank."""
    path = folder / "job.toml"
    path.write_text(job_text)
    job = load_job(path)
    run = trained(job, alone(job), steps=steps, compare=False, data=open_data(job, folder))
    return [report.loss for report in run.reports]


ORPHAN_S = 36_000
"""Longer than the tests of other packages take on a slow machine."""


class ForkServer:
    """The fork server, for the duration of the tests."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "fork_server.sock"
        self._log = (folder / "fork_server.log").open("wb")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "agents.workers.fork_server",
                str(self._path),
                "worker.control.worker_process",
                str(ORPHAN_S),
            ],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while not self._path.exists():
            assert self._process.poll() is None, "the fork server did not start"
            time.sleep(0.02)

    def fork(self, home: Path, spec: dict[str, Any]) -> int:
        """Fork a worker and return its process id."""
        home.mkdir(parents=True, exist_ok=True)
        return int(self._ask({"ask": "fork", "folder": str(home), "spec": spec})["pid"])

    def end(self) -> None:
        """Stop the server."""
        self._ask({"ask": "end"})
        self._process.wait(10)
        self._log.close()

    def _ask(self, question: dict[str, Any]) -> Any:
        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.connect(str(self._path))
            except ConnectionRefusedError as error:
                self._log.flush()
                said = Path(self._log.name).read_text(encoding="utf-8")[-2000:]
                raise AssertionError(f"it ended with {self._process.poll()}: {said}") from error
            line.sendall(json.dumps(question).encode() + b"\n")
            with line.makefile() as answer:
                return json.loads(answer.readline())


@dataclass(eq=False)
class Process:
    """One worker process and its assignment."""

    pid: int
    node: str
    device: int
    home: Path
    spec: dict[str, Any]
    statuses: list[Status] = field(default_factory=list)
    line: socket.socket | None = None
    unread: bytes = b""

    @property
    def status(self) -> Status:
        return self.statuses[-1] if self.statuses else {"generation": 0, "taking": "", "step": 0}

    def send(self, **order: Any) -> None:
        assert self.line is not None
        order.setdefault("generation", self.spec["generation"])
        # A process that has just died takes no orders; its end is seen when its line is read.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.line.sendall(json.dumps(order).encode() + b"\n")


class Agents:
    """All nodes of a small cluster; each has a snapshot folder and an HTTP server."""

    def __init__(
        self,
        root: Path,
        fork_server: ForkServer,
        job: str,
        nodes: tuple[str, ...],
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        self.wait_s = wait_s
        self.root, self.fork_server, self.job = root, fork_server, job
        self.processes: list[Process] = []
        self._servers = {node: _snapshot_server(self.memory(node)) for node in nodes}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(root / "workers.sock"))
        self._socket.listen(32)

    def memory(self, node: str) -> Path:
        """Return the node's snapshot folder."""
        return self.root / "memory" / node

    def start(
        self,
        plan: Plan,
        generation: int,
        restore: dict[str, Any] | None = None,
        *,
        has_rendezvous: bool = True,
        **changes: Any,
    ) -> None:
        """Assign the ranks of a plan: to idle workers on their devices first, then to new ones."""
        folder = self.root / "generation" / str(generation)
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(plan_text(plan))
        (folder / "job.toml").write_text(self.job)
        used: dict[str, int] = {}
        for rank in rank_places(plan):
            place = plan.pipelines[rank.pipeline].stages[rank.stage].places[0]
            assert place.node is not None
            device = used[place.node] = used.get(place.node, -1) + 1
            spec = self._spec(plan, generation, rank.rank, place.node, device)
            spec |= {"restore": restore or {"step": 0, "generation": 0, "source": "start"}}
            self._assign({**spec, **changes})
        if has_rendezvous and plan.device_count > 1:
            self._send_rendezvous(generation)

    def _spec(
        self, plan: Plan, generation: int, rank: int, node: str, device: int
    ) -> dict[str, Any]:
        folder = self.root / "generation" / str(generation) / str(rank)
        folder.mkdir()
        return {
            "job": "j",
            "generation": generation,
            "term": 1,
            "rank": rank,
            "ranks": plan.device_count,
            "device": device,
            "node": node,
            "host": "127.0.0.1",
            "folder": str(folder),
            "memory": str(self.memory(node)),
            "memory_every": 1,
            "persist_every": None,
            "peers": {
                name: {
                    "address": f"127.0.0.1:{server.server_port}",
                    "zone": "z",
                    "name": name,
                    "has_left": False,
                }
                for name, server in self._servers.items()
            },
            "ticket": "t",
            "manifest": None,
            "socket": str(self.root / "workers.sock"),
            "orphan_s": 30.0,
            "threads": 1,
        }

    def _assign(self, spec: dict[str, Any]) -> None:
        for process in self.processes:
            place = (process.node, process.device)
            if place == (spec["node"], spec["device"]) and process.status["taking"] == "idle":
                process.spec = spec
                process.send(order="join", spec=spec)
                return
        home = self.root / "process" / f"{spec['generation']}.{spec['rank']}"
        pid = self.fork_server.fork(home, spec)
        self.processes.append(Process(pid, spec["node"], spec["device"], home, spec))

    def gang(self, generation: int) -> list[Process]:
        """Return the processes of a generation by rank."""
        found = [p for p in self.processes if p.spec["generation"] == generation]
        return sorted(found, key=lambda process: process.spec["rank"])

    def _send_rendezvous(self, generation: int) -> None:
        gang = self.gang(generation)
        self.wait(
            lambda: gang[0].status["generation"] == generation and gang[0].status.get("meeting"),
            needs=gang[:1],
        )
        self.wait(lambda: all(process.line is not None for process in gang), needs=gang)
        for process in gang[1:]:
            process.send(order="meet", address=gang[0].status["meeting"])

    # ---- receiving ------------------------------------------------------------------------------

    def wait(self, is_so: Callable[[], Any], *, needs: list[Process] | None = None) -> None:
        """Receive reports until the condition holds; needed processes must not exit."""
        deadline = time.monotonic() + self.wait_s
        while not is_so():
            self._receive(0.05)
            for process in needs or ():
                gone = not Path("/proc", str(process.pid)).exists()
                assert not gone or is_so(), self.output(process)
            assert time.monotonic() < deadline, [
                (p.spec["rank"], p.status, self.output(p)) for p in self.processes
            ]

    def wait_taking(self, generation: int, taking: str, *, step: int = 0) -> None:
        """Wait until all workers of the generation report this state."""
        gang = self.gang(generation)
        self.wait(
            lambda: all(
                (p.status["generation"], p.status["taking"]) == (generation, taking)
                and p.status["step"] >= step
                for p in gang
            ),
            needs=gang,
        )

    def order(self, generation: int, **order: Any) -> None:
        """Send a command to all workers of a generation."""
        for process in self.gang(generation):
            process.send(**order)

    def output(self, process: Process) -> str:
        """Return its output."""
        return (process.home / "output").read_text(errors="replace")

    def logged_losses(self) -> list[tuple[int, int, float]]:
        """Return generation, step and loss of every step of every process, as logged.

        Unlike the statuses, of which a later one may replace an earlier one, the log is complete.
        """
        lines = [line for process in self.processes for line in self.output(process).splitlines()]
        steps = [json.loads(line) for line in lines if line.startswith("{")]
        return [(step["generation"], step["step"], step["loss"]) for step in steps]

    def check_losses(self, expected: list[float], *, rel: float = 0.0) -> list[int]:
        """Check every logged loss against an uninterrupted run; return the steps, with repeats."""
        known = [each for each in self.logged_losses() if each[1] <= len(expected)]
        for generation, step, loss in known:
            assert loss == pytest.approx(expected[step - 1], rel=rel, abs=0.0), (generation, step)
        return [step for _, step, _ in known]

    def stop(self, generation: int, *, after: int) -> int:
        """Stop a generation at the end of a step, and return the step."""
        gang = self.gang(generation)
        self.wait_taking(generation, "running", step=after)
        gang[-1].send(order="stop", stop_at=after)
        self.wait_taking(generation, "stopped")
        (step,) = {process.status["step"] for process in gang}
        assert {process.status["sealed_at"]["step"] for process in gang} == {step}
        return step

    def leave(self, generation: int) -> None:
        """Abort a generation and wait until its workers have left it."""
        self.order(generation, order="abort")
        self.wait_taking(generation, "idle")

    def kill(self, process: Process) -> None:
        """Kill the process with SIGKILL."""
        os.kill(process.pid, signal.SIGKILL)
        self.forget(process)

    def forget(self, process: Process) -> None:
        """Remove an exited process."""
        self.processes.remove(process)
        if process.line is not None:
            process.line.close()

    def _receive(self, timeout_s: float) -> None:
        connections = {p.line: p for p in self.processes if p.line is not None}
        ready, _, _ = select.select([self._socket, *connections], [], [], timeout_s)
        for line in ready:
            if line is self._socket:
                self._accept()
                continue
            process = connections[line]
            try:
                data = line.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                line.close()
                process.line = None
                continue
            *lines, process.unread = (process.unread + data).split(b"\n")
            for status in map(json.loads, lines):
                sealed = status.get("sealed_at")
                if sealed is not None and sealed != process.status.get("sealed_at"):
                    self._replicate(process, sealed)
                process.statuses.append(status)

    def _replicate(self, process: Process, point: dict[str, int]) -> None:
        """Copy pieces to their buddies and report it."""
        about = (self.memory(process.node), "j")
        folder = snapshot_file.point_folder(*about, **point)
        for found in snapshot_file.sealed_files(folder):
            if found.header.rank != process.status.get("rank", found.header.rank):
                continue
            bodies: dict[str, dict[tuple[int, int], bytes]] = {}
            for piece in found.header.pieces:
                if piece.buddy is not None:
                    body = snapshot_file.read_piece(found.path, piece)
                    bodies.setdefault(piece.buddy, {})[piece.key] = body
            for buddy, each in bodies.items():
                to = snapshot_file.point_folder(self.memory(buddy), "j", **point)
                to.parent.mkdir(parents=True, exist_ok=True)
                write_copy(to, found.header, each)
        if process.line is not None:
            process.send(order="replicated", point=point)

    def _accept(self) -> None:
        line, _ = self._socket.accept()
        raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = struct.unpack("3i", raw)[0]
        found = [process for process in self.processes if process.pid == pid]
        if found:
            found[0].line, found[0].unread = line, b""
        else:
            line.close()

    def stop_listening(self) -> None:
        """Close the socket that the workers connect to."""
        self._socket.close()
        for process in self.processes:
            if process.line is not None:
                process.line.close()
                process.line = None

    def close(self) -> None:
        """Stop everything."""
        for process in self.processes:
            if process.line is not None:
                process.line.close()
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._socket.close()
        for node in self._servers:
            self.close_server(node)

    def close_server(self, node: str) -> None:
        """Serve a node's snapshots no longer, as when its agent is killed."""
        self._servers[node].close()


@contextmanager
def snapshot_server(memory: Path) -> Iterator[int]:
    """Serve one node's snapshots; yields the port."""
    with closing(_snapshot_server(memory)) as server:
        yield server.server_port


def _snapshot_server(memory: Path) -> LocalServer:
    """Return an HTTP server for a node's snapshots."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            assert self.headers["Sailor-Ticket"] == "t"
            _, _, _, job, point, *file = self.path.split("/")
            folder = memory / job / point
            if not file:
                found = {e.path.name: e.header for e in snapshot_file.sealed_files(folder)}
                self.answer(200, snapshot_file.listing(found))
                return
            first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
            content = (folder / file[0]).read_bytes()[first : last + 1]
            self.answer(206, content, "application/octet-stream")

    return LocalServer(Handler)


def write_copy(
    folder: Path, header: snapshot_file.Header, bodies: Mapping[tuple[int, int], bytes]
) -> Path:
    """Write a sealed file with some pieces of another one, atomically."""
    copied = snapshot_file.partial_header(header, bodies)
    early = folder.parent / snapshot_file.part_name(
        header.generation, header.rank, os.getpid(), header.step
    )
    early.unlink(missing_ok=True)
    file = snapshot_file.create(early, copied.total_bytes)
    try:
        for piece in copied.pieces:
            snapshot_file.check_piece(bodies[piece.key], piece, name=copied.file_name)
            os.pwrite(file, bodies[piece.key], piece.offset)
        snapshot_file.seal(file, copied)
        folder.mkdir(exist_ok=True)
        return early.rename(folder / copied.file_name)
    finally:
        os.close(file)
        early.unlink(missing_ok=True)
