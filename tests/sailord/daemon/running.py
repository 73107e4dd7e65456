"""A real sailord and fake agents on this machine, for tests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sailord.local.paths import free_port

ROOT = Path(__file__).resolve().parents[3]
JOB = (ROOT / "examples" / "small.toml").read_text(encoding="utf-8").replace("steps = 20\n", "")
TOKEN = "a-token-that-is-long-enough"
ANSWER_S = 40.0
"""Longest wait for an answer, on a machine that is busy otherwise."""


class Over(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(str(self.path))


@dataclass(eq=False)
class Place:
    """One folder with a cluster's configuration, and the processes started on it."""

    folder: Path
    name: str = "head"
    store: str = ""
    port: int = field(default_factory=free_port)
    options: str = ""
    webhooks: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Of sailord, beside this process's."""

    def __post_init__(self) -> None:
        self.key = self.folder / "key"
        self.key.write_text("k" * 64)
        self.key.chmod(0o600)
        (self.folder / "token").write_text(TOKEN)
        (self.folder / "token").chmod(0o600)
        state = self.folder / self.name
        self.socket = state / "sailord.sock"
        self.store_url = self.store or f"unix://{state}/store.sock"
        store_line = f'store = "{self.store}"\n' if self.store else ""
        self.config = self.folder / f"{self.name}.toml"
        self.config.write_text(
            f'cluster_name = "test"\nstate = "{self.name}"\n{store_line}key = "key"\n'
            f'cluster = "{ROOT}/examples/three-zones.toml"\nlog = "json"\n'
            f'[checkpoints]\nallowed = ["gs://", "s3://", "az://", "memory://", "file://{self.folder}"]\n'
            f'[listen]\nport = {self.port}\ntoken_file = "token"\n'
            f"[options]\nlease_s = 2.0\nadditions_gather_s = 0.5\n[options.testing]\n"
            f"grace_s = 0.5\nstart_gather_s = 0.2\nfailure_pause_s = 0.1\n"
            f"{self.options}{self.webhooks}"
        )

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / f"{self.name}.log").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "sailord.main", "run", "--config", self.config],
                cwd=ROOT, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, **self.environment},
            )  # fmt: skip
        self.processes.append(process)
        return process

    def start_agent(self, name: str) -> Path:
        count = self.folder / f"{name}.count"
        with (self.folder / f"{name}.log").open("ab") as out:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.sailord.daemon.fake_agent",
                     self.store_url, self.key, name, count],
                    cwd=ROOT, stdout=out, stderr=out,
                )
            )  # fmt: skip
        return count

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The answer over the Unix socket."""
        connection = Over(self.socket)
        try:
            raw = None if body is None else json.dumps(body)
            connection.request(method, path, raw)
            reply = connection.getresponse()
            text = reply.read()
            is_json = "json" in reply.headers.get("Content-Type", "")
            return reply.status, json.loads(text) if is_json else text.decode()
        finally:
            connection.close()

    def status(self) -> Any:
        code, value = self.ask("GET", "/v1/status")
        assert code == 200, value
        return value

    def stop_all(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
