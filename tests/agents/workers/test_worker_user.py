"""Workers of a user of their own: they train, and can read no secret of the agent.

The agent, the service ``sailor-agent workers`` and its workers run as two users here, without any
capability, in a mount namespace in which these can read this Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agents.daemon.process_cleanup import kill_all, mark
from agents.protocol.codec import decode
from agents.protocol.records import Output
from agents.work.environment import SetupError, set_up
from agents.work.work_folder import WorkFolder
from agents.workers.fork_client import ForkClient, ForkedCommands, service_socket
from agents.workers.pidfd import process_start
from tests.agents.running import KEY, ROOT, Place, place
from tests.fakes.worker import MEETING
from tests.processes import until

AGENT, WORKERS = 61001, 61002
"""Users; the group of both is that of the workers."""
OPEN_PYTHON = """
mount --bind "$1" "$2" && mount -t tmpfs -o mode=755 none "$3" && mkdir -p "$1" &&
mount --bind "$2" "$1" && shift 3 && exec "$@"
"""


def closed_parent(path: Path) -> Path | None:
    """Return the highest folder above a path that other users cannot enter."""
    closed = [each for each in path.parents if not each.stat().st_mode & 0o001]
    return closed[-1] if closed else None


def _why_not() -> str:
    if os.geteuid() != 0:
        return "only root can become other users"
    if shutil.which("setpriv") is None:
        return "there is no setpriv"
    if closed_parent(ROOT / "x") is not None or closed_parent(Path(sys.prefix) / "x") is not None:
        return "other users cannot read this checkout"
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        return "no mount namespace can be made"
    return ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter; they can read what is made in it."""
    path = Path(tempfile.mkdtemp(prefix="sailor-users-"))
    path.chmod(0o711)
    before = os.umask(0o022)
    (path / "python").mkdir()
    yield path
    os.umask(before)
    assert kill_all(path) == []
    shutil.rmtree(path)


def as_user(user: int, folder: Path) -> list[str]:
    """Return the start of a command that runs as a user without capabilities."""
    become = ["setpriv", f"--reuid={user}", f"--regid={WORKERS}", "--clear-groups"]
    become += ["--bounding-set=-all", "--no-new-privs"]
    base = Path(sys.base_prefix)
    closed = closed_parent(base / "x")
    if closed is None:
        return become
    names = [str(base), str(folder / "python"), str(closed)]
    return ["unshare", "-m", "sh", "-c", OPEN_PYTHON, "sh", *names, *become]


def make_folders(shared: Path) -> None:
    """Make what the unit ``sailor-worker`` makes."""
    for path, mode in ((shared, 0o750), (shared / "fork", 0o770)):
        path.mkdir()
        os.chown(path, AGENT, WORKERS)
        path.chmod(mode)


def start_service(
    folder: Path, config: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [*as_user(WORKERS, folder), sys.executable, "-P", "-m", "agents.main", "workers"]
    with (folder / "service.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--config", str(config)], cwd=ROOT, stdout=log, stderr=log,
            env={**os.environ, **mark(folder), **environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip


class TwoUsers(Place):
    """A cluster whose one node has two users."""

    def start_agent(self) -> subprocess.Popen[bytes]:
        command = [*as_user(AGENT, self.folder), sys.executable, "-P", "-m", "agents.main", "run"]
        command += ["--emulate", "2xA100-40", "--config", str(self.folder / "agent.toml")]
        with (self.folder / "agent.log").open("ab") as log:
            agent = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log,
                env={**os.environ, **mark(self.folder), "GCE_METADATA_HOST": "127.0.0.1:9",
                     "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        self.agents.append(agent)
        return agent

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    def state(self, name: str = "a") -> Path:
        assert name == "a"
        return self.shared


@contextlib.asynccontextmanager
async def two_users(folder: Path, prizes: list[Path]):
    async with place(folder) as one:
        here = TwoUsers(folder, one.store, one.http, agents=one.agents)
        os.chown(folder / "key", AGENT, WORKERS)
        os.chown(folder / "store.sock", AGENT, WORKERS)
        for name, owner, mode in (("state", AGENT, 0o700), ("memory-a", AGENT, 0o700),
                                  ("meeting", WORKERS, 0o700)):  # fmt: skip
            (folder / name).mkdir()
            os.chown(folder / name, owner, WORKERS)
            (folder / name).chmod(mode)
        make_folders(here.shared)
        (folder / "agent.toml").write_text(
            f'cluster_name = "test"\nname = "a"\nstate = "state"\nkey = "key"\nlease_s = 2.0\n'
            f'memory = "memory-a"\nworker = "tests.agents.workers.prying_worker"\nthreads = 1\n'
            f'store = "unix://{folder}/store.sock"\nzone = "z"\nworker_folder = "shared"\n'
            "[listen]\nport = 0\n"
        )
        agent = here.start_agent()
        told = {
            MEETING: str(folder / "meeting"),
            "SAILOR_PRYING": ":".join(map(str, prizes)),
            "SAILOR_PIDS": json.dumps([agent.pid, os.getpid()]),
        }
        service = start_service(folder, folder / "agent.toml", told)
        try:
            yield here
        finally:
            kill_all(folder)
            service.wait()
            for log in folder.glob("*.log"):
                print(log.read_text())  # Shown if the test fails.


@pytest.mark.slow
async def test_workers_train_and_read_no_secret(folder):
    state, shared = folder / "state", folder / "shared"
    prizes = [
        folder / "key",
        folder / "store.sock",
        state,
        state / "life.json",
        folder / "store.db",
    ]
    own = [shared / "generation" / "1" / "plan.json", shared / "generation" / "1" / "known.json"]
    async with two_users(folder, [*prizes, *own]) as here:
        node = await here.ready()
        await here.open(node, 1, memory_every=2)
        await until(lambda: here.step(1) > 0)
        got = json.loads((shared / "generation" / "1" / "0" / "got.json").read_text())
        assert got["user"] == WORKERS
        assert got["read"] == [str(each) for each in own]
        assert got["written"] == []
        assert got["killed"] == []
        # A sealed snapshot of another user's process is this node's.
        await until(lambda: list(here.memory().glob("job/1-*/0.snap")))
        report = await until(lambda: here.is_taking("running"))
        workers = here.workers(1)
        assert set(workers) == {0, 1}

        # The log that was replaced by a link to the key is not shown.
        home = shared / "process" / "job.1.0"
        (home / "output").unlink()
        (home / "output").symlink_to(folder / "key")
        status, body = await here.ask("GET", "/v1/logs/0")
        assert status == 200
        assert KEY.keys[0].decode() not in body.decode()
        assert decode(Output, body).parts == ()

        # An agent that was killed finds them again.
        here.agents[0].kill()
        here.agents[0].wait()
        here.start_agent()
        await until(lambda: is_past(here, report.step + 5))
        assert here.workers(1) == workers

        # The one that is not needed is ended by the service, as the agent may not.
        await here.open(node, 2, ranks=1, memory_every=2)
        await until(lambda: here.step(2) > 0)
        assert process_start(workers[1]) is None


async def is_past(here: TwoUsers, step: int) -> bool:
    report = await here.report()
    return report is not None and report.step > step and report.taking == "running"


@contextlib.asynccontextmanager
async def service_of(folder: Path, store: str = "unix:///no"):
    make_folders(folder / "shared")
    (folder / "agent.toml").write_text(
        f'cluster_name = "test"\nname = "a"\nstate = "state"\nkey = "key"\nstore = "{store}"\n'
        'worker = "tests.fakes.worker"\nworker_folder = "shared"\n'
    )
    service = start_service(folder, folder / "agent.toml", {})
    client = ForkClient(folder / "shared", "unused", 60.0, is_service=True)
    await until(service_socket(folder / "shared").exists)
    try:
        yield client
    finally:
        await client.close()
        assert await asyncio.to_thread(service.wait) == 0


async def test_the_service_needs_no_secret_of_the_store(folder):
    """Only the agent opens it, and only the agent's user may read its password."""
    password = folder / "etcd.password"
    password.write_text("s3cret")
    os.chown(password, AGENT, WORKERS)
    password.chmod(0o600)
    async with service_of(folder, f"etcd://127.0.0.1?user=a&password_file={password}"):
        pass


def work_folder(folder: Path) -> WorkFolder:
    work = WorkFolder(folder / "shared" / "work" / "one")
    for path in (work.home.parent, work.home, work.files):
        path.mkdir()
        os.chown(path, AGENT, WORKERS)
    work.share(with_environment=True)
    for path in (work.files, work.environment):
        os.chown(path, AGENT, WORKERS)
    return work


@pytest.mark.slow
async def test_setup_commands_run_as_the_workers_user(folder):
    async with service_of(folder) as client:
        work = work_folder(folder)
        secret = {"TOKEN": "s3cret"}
        said = "id -u; python -c 'import numpy' && command -v pip; echo $TOKEN > made; echo $TOKEN"
        await set_up(work, (said,), secret, OwnedByAgent(client))
        log = work.log.read_text().splitlines()
        assert log[1:] == [str(WORKERS), str(work.environment / "bin" / "pip"), "***"]
        assert (work.files / "made").stat().st_uid == WORKERS
        with pytest.raises(SetupError, match="exited with 3: no"):
            await set_up(work_again(work), ("echo no; exit 3",), {}, OwnedByAgent(client))


def work_again(work: WorkFolder) -> WorkFolder:
    shutil.rmtree(work.environment)
    work.environment.mkdir()
    os.chown(work.environment, AGENT, WORKERS)
    work.environment.chmod(0o770)
    return work


class OwnedByAgent(ForkedCommands):
    """As if this process had the agent's group."""

    async def start(self, command, cwd, variables, output):
        await self.client.kill_all(self.home)
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        os.chown(self.home, AGENT, WORKERS)
        self.home.chmod(0o770)
        return await self.client.run(self.home, command, cwd, variables, output)


@pytest.mark.slow
async def test_a_setup_command_that_is_no_longer_needed_is_ended(folder):
    async with service_of(folder) as client:
        work = work_folder(folder)
        command = "echo $$ > pid; sleep 1000 & wait"
        running = asyncio.create_task(set_up(work, (command,), {}, OwnedByAgent(client)))
        pid = int(await until(lambda: read(work.files / "pid")))
        assert process_start(pid) is not None
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert process_start(pid) is None


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def test_the_service_refuses_connections_of_workers(folder):
    """They have its user, and could have it kill and fork what the agent has not ordered."""
    async with service_of(folder):
        code = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
            's.sendall(b\'{"ask": "sync"}\\n\'); print(s.recv(100))'
        )
        socket_path = str(service_socket(folder / "shared"))
        command = [*as_user(WORKERS, folder), sys.executable, "-c", code, socket_path]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=False
        )
        assert "{}" not in done.stdout
        assert done.stdout or "ConnectionResetError" in done.stderr or "BrokenPipe" in done.stderr
