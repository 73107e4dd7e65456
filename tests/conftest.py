"""What all tests share: random cases, the time limit, and what a test must leave as it found it."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT.parent / "shared" / "reference"

MARK = "SAILOR_TEST_RUN"
"""Environment variable by which a process shows which run of the tests started it."""
SET_BY_LIBRARIES = (
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    "GLOO_ENABLE_STORE_V2_API",
)
ENDING_MAX_S = 20.0
LONG_LIMIT_S = 900.0
"""Time limit of a test marked ``slow``; all others have the limit in pyproject.toml."""

LONGEST = (
    *("control/test_upgrade.py", "control/test_rebuild.py", "daemon/test_webhook_sender.py"),
    *("other_formats/test_import_and_export.py", "tour/test_tour.py"),
)
"""Begun before all others, so that no process is left with one when the others have ended."""

# Moments are printed in local time.
os.environ["TZ"] = "UTC"
time.tzset()
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # As the store sets it when it opens etcd.

# `make sim` and `make chaos` raise this; `make test` tries few cases, so that it stays quick.
EXAMPLES = int(os.environ.get("SAILOR_EXAMPLES", "12"))

settings.register_profile(
    "sailor",
    max_examples=EXAMPLES,
    derandomize=True,  # The same commit tries the same cases everywhere.
    database=None,
    deadline=None,  # A slow machine is not a wrong answer.
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("sailor")


@pytest.fixture
def descriptors() -> Iterator[int]:
    """As many as the machine lets us have; the limit of this process is put back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of measured runs, or a skip where this checkout stands alone."""
    if not REFERENCE.is_dir():
        pytest.skip("the reference measurements are not beside this checkout")
    return REFERENCE


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Keep the collector out of a parser that reads JSON or TOML to the limit of recursion.

    Before Python 3.12 it may run in there, and the finalizers of an earlier test then fail.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test, with a path so short that sockets in it can be opened."""
    name = re.sub(r"\W", "_", request.node.name.removeprefix("test_"))[:12]
    return tmp_path_factory.mktemp(name)


@pytest.fixture(scope="session")
def examples() -> int:
    """How many random cases a test that draws its own should try."""
    return EXAMPLES


def the_first_quick(values: Iterable[object], *, quick: int) -> list[object]:
    """Parameters of which `make test` tries the first few, and `make test-slow` the rest."""
    return [
        value if number < quick else pytest.param(value, marks=pytest.mark.slow)
        for number, value in enumerate(values)
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process that runs tests: its signals, and the mark on what it starts."""
    is_worker = hasattr(config, "workerinput")
    if not is_worker and config.getoption("numprocesses", None):
        return  # The tests run in other processes.
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    # `nohup` and `&` start us with signals ignored, and a child would inherit that; of a handler
    # it inherits nothing, and starts with the default.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests their time limit and place; leave to `make chaos` what takes longest."""
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))  # Otherwise at random.
    by_hand = "SAILOR_EXAMPLES" in os.environ  # `make sim` and `make chaos` take as long as asked.
    for item in items:
        if item.get_closest_marker("at_length"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.chaos)
            by = "make attack" if item.path.parent.name == "attacks" else "make chaos"
            item.add_marker(pytest.mark.skipif(not by_hand, reason=f"long: {by} runs it"))
        if by_hand or item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(0 if by_hand else LONG_LIMIT_S))


def pytest_collection_finish() -> None:
    """Keep the collector from walking a million objects of tests and libraries each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _environment_and_files_are_as_before() -> Iterator[None]:
    """Fail a test that leaves its environment, folder or signal handlers changed, or files open.

    Files left open in a reference cycle are found by a collection, whose warning is an error.
    """
    environment, folder, handlers = _environment(), Path.cwd(), _handlers()
    modules_from = list(sys.path)
    files = len(os.listdir("/proc/self/fd"))
    yield
    if len(os.listdir("/proc/self/fd")) > files:
        gc.collect()
    changed = {key for key, _ in environment.items() ^ _environment().items()}
    if changed:
        os.environ.update(environment)
        for key in changed - environment.keys():
            del os.environ[key]
    assert not changed, "the test left environment variables changed"
    sys.path[:] = modules_from  # The folder of a script stays in the path of what loaded it.
    assert Path.cwd() == folder
    assert _handlers() == handlers, "the test left a signal handler changed"


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in SET_BY_LIBRARIES}


def _handlers() -> list[object]:
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)
    return [signal.getsignal(number) for number in numbers]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """At the end of each file, end the processes that its tests left behind, and fail."""
    yield
    if nextitem is None or nextitem.path != item.path:
        end_s = time.monotonic() + ENDING_MAX_S
        while (left := _orphans(os.environ[MARK])) and time.monotonic() < end_s:
            time.sleep(0.1)  # What ends with its parent may need a moment.
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"tests of {item.path.name} left processes behind: {left}"


def _orphans(mark: str) -> dict[int, str]:
    """Return the command lines of processes with our mark that no longer descend from us.

    Our own children are not among them: those of session-wide fixtures live on, and one that a
    test forgot is found by the warning of ``subprocess.Popen``.
    """
    parents, marked = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[int(folder.name)] = int(parent)
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                marked[int(folder.name)] = command.decode(errors="replace").strip()
        except OSError:
            continue  # It has ended, or is not ours.

    def is_ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return {pid: command for pid, command in marked.items() if not is_ours(pid)}
