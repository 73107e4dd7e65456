"""The fork server: a process that has imported what workers need, and forks one on request.

``python -m agents.workers.fork_server SOCKET MODULE [ORPHAN_S]`` listens for the agent. As
``sailor-agent workers`` it is a service of another user, and so are the workers and setup commands
that it starts: it listens to the agent only, and ends processes for it. It serves one connection to
its end before it accepts the next, so that a new agent's first request is answered only when all
requests of the previous agent are done. It outlives agents, and workers outlive it. It ends when
its socket is deleted, or when no agent has called for ``ORPHAN_S`` and no worker is left. SIGTERM
while no agent runs, as systemd sends it to whatever is left at a shutdown, ends it and its workers;
while one runs, the agent decides.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from agents.daemon.error_text import describe_error
from agents.daemon.named_socket import named_socket
from agents.daemon.oom_score import end_before_the_daemon
from agents.daemon.state_folder import lock_file
from agents.daemon.systemd import notify
from agents.workers.pidfd import kill_group, peer_of, process_start
from worker.atomic_file import replace_file
from worker.spec_protocol import SPEAKS

READ_BYTES = 1 << 16
LOOK_S = 1.0
ORPHAN_S = 1800.0


class ForkServer:
    """Listens on a socket and forks workers; it knows the folder of each of its children."""

    def __init__(
        self,
        path: Path,
        module: ModuleType,
        orphan_s: float = ORPHAN_S,
        *,
        is_service: bool = False,
    ) -> None:
        self.module, self.is_service = module, is_service
        self.path, self.orphan_s = path, orphan_s
        self.asked_at = time.monotonic()
        self.children: dict[int, Path] = {}
        self.is_over = False
        self.woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with named_socket(path, 0o660 if is_service else 0o600) as early:
            self.listener.bind(str(early))
            early.chmod(0o600)  # Closed to others until it has its final mode.
            self.listener.listen(4)
            self.inode = early.stat().st_ino

    def run(self) -> None:
        """Serve until an agent ends it, or until it is orphaned."""
        while not (self.is_over or self._is_orphaned()):
            if self._wait(self.listener):
                self.asked_at = time.monotonic()
                connection, _ = self.listener.accept()
                with connection, contextlib.suppress(ConnectionError):
                    # Workers have our user, and must not be able to keep the agent waiting.
                    if not (self.is_service and peer_of(connection)[1] == os.getuid()):
                        self._serve(connection)

    def _on_sigterm(self, *_: object) -> None:
        """End the workers too, unless an agent holds the lock of the state folder."""
        lock = lock_file(self.path.parent / "lock")
        if lock is None:
            return
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.is_over = True
        os.close(lock)

    def _serve(self, connection: socket.socket) -> None:
        rest, passed = b"", list[int]()
        try:
            while not self.is_over:
                if not self._wait(connection):
                    continue
                # A long request comes in parts, and its descriptor with the first one.
                data, more, _, _ = socket.recv_fds(connection, READ_BYTES, 1)
                passed += more
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    # A request is carried out even if the agent dies before it reads the answer.
                    try:
                        answer = self._answer(json.loads(line), passed)
                    except OSError as error:  # A full disk, for example.
                        answer = {"speaks": SPEAKS, "error": describe_error(error, self.path)}
                    with contextlib.suppress(BrokenPipeError):
                        connection.sendall(json.dumps(answer).encode() + b"\n")
                    while passed:
                        os.close(passed.pop())
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def _is_orphaned(self) -> bool:
        """Return whether the socket was deleted, or no agent calls and no worker is left."""
        try:
            is_reachable = self.path.stat().st_ino == self.inode
        except OSError:
            is_reachable = False
        is_late = time.monotonic() > self.asked_at + self.orphan_s
        return not is_reachable or (is_late and not self.children)

    def _wait(self, end: socket.socket) -> bool:
        """Wait up to ``LOOK_S``; return whether ``end`` can be read."""
        if self.is_service:
            notify("WATCHDOG=1")
        ready, _, _ = select.select([end.fileno(), self.woken], [], [], LOOK_S)
        if self.woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.woken, 4096)
            self._reap()
        return end.fileno() in ready

    def _answer(self, asked: dict[str, Any], passed: list[int]) -> dict[str, Any]:
        match asked["ask"]:
            case "fork":
                folder, spec = Path(asked["folder"]), asked["spec"]
                return {"pid": self._fork(folder, spec, lambda: self._become_worker(folder, spec))}
            case "run":
                command = {name: asked[name] for name in ("command", "cwd", "variables")}
                run = functools.partial(_become_command, output=passed[0], **command)
                return {"pid": self._fork(Path(asked["folder"]), {}, run)}
            case "kill":
                kill_group(asked["pid"], asked["start"])
            case "kill_all":
                for pid in [pid for pid, at in self.children.items() if str(at) == asked["folder"]]:
                    kill_group(pid, process_start(pid))
            case "end":
                self.is_over = True
            case _:
                pass  # "sync": the answer says that all earlier requests are done.
        return {"speaks": SPEAKS}

    def _fork(self, folder: Path, spec: dict[str, Any], become: Callable[[], int]) -> int:
        """Fork a process that ends with what ``become`` returns."""
        go, gate = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                os.close(gate)
                _become(go, become)
            self.children[pid] = folder
            # The worker runs only once it is recorded, so that no agent can overlook it.
            record = {**spec, "pid": pid, "start": process_start(pid)}
            replace_file(folder / "process.json", json.dumps(record), is_durable=False)
            os.write(gate, b"!")
        finally:
            os.close(go)
            os.close(gate)
        return pid

    def _become_worker(self, folder: Path, spec: dict[str, Any]) -> int:
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o660)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 1024)
        return int(self.module.main(spec))

    def _reap(self) -> None:
        """Write the exit codes of the children that have ended."""
        with contextlib.suppress(ChildProcessError):
            while self.children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (folder := self.children.pop(ended[0], None)) is not None:
                    with contextlib.suppress(OSError):
                        code = str(os.waitstatus_to_exitcode(ended[1]))
                        replace_file(folder / "exit", code, is_durable=False)


def _become(go: int, become: Callable[[], int]) -> None:
    """Run in the new process, once the fork server has recorded it."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid()
        if os.read(go, 1) == b"!":
            code = become()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_command(*, command: str, cwd: str, variables: dict[str, str], output: int) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1024)
    os.chdir(cwd)
    os.execve("/bin/sh", ["sh", "-c", command], {**os.environ, **variables})


def main(
    path: str, module: str, orphan_s: str = str(ORPHAN_S), *, is_service: bool = False
) -> None:
    """Import the workers' module, then serve."""
    end_before_the_daemon()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Until there are workers to end.
    loaded = importlib.import_module(module)
    server = ForkServer(Path(path), loaded, float(orphan_s), is_service=is_service)
    if is_service:
        notify("READY=1")
    server.run()


def serve_as_a_service(path: Path, module: str) -> None:
    """Serve until the agent ends it, as a user other than the agent's."""
    os.umask(0o007)  # The agent has our group, so that it can read and delete files of workers.
    main(str(path), module, "inf", is_service=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
