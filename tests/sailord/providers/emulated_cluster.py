"""A real sailord that rents emulated instances: agents on this machine."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import kill_all
from sailord.local.paths import LocalFolders
from tests import processes


def agent_text(place: LocalFolders, memory: Path, lease_s: float = 2.0) -> str:
    return (
        f'cluster_name = "local"\nstate = "."\nkey = "{place.folder}/key"\n'
        f'store = "unix://{place.folder}/head/store.sock"\n'
        f'catalogue = "{place.folder}/catalogue.toml"\nworker = "worker.control.worker_process"\n'
        f'memory = "{memory}"\nthreads = 1\nlease_s = {lease_s}\norphan_s = {5 * lease_s}\n'
        "[listen]\nport = 0\n"
    )


@contextlib.contextmanager
def renting_sailord(folder: Path, config: str) -> Iterator[LocalFolders]:
    """Run a sailord with these lines in its file; end it and its instances."""
    place = LocalFolders(folder, memory_gib=1.455)  # So that one instance can train the model.
    place.make()
    (place.folder / "agent-base.toml").write_text(agent_text(place, place.memory))
    with (place.folder / "sailord.toml").open("a") as file:
        file.write(config)
    words = ["sailord.main", "run", "--config", str(place.folder / "sailord.toml")]
    with (place.folder / "sailord.log").open("ab") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", *words], stdout=log, stderr=log, start_new_session=True
        )
    yield place
    head.send_signal(signal.SIGTERM)
    head.wait(20)
    for instance in (place.folder / "machines").glob("*"):
        kill_all(instance)
    place.remove()


@contextlib.contextmanager
def traced_sailord(folder: Path, config: str, trace: str) -> Iterator[LocalFolders]:
    """Run a sailord whose pools have what this trace says, for ``TRACE`` in its lines."""
    (folder / "trace.toml").write_text(trace)
    config = config.replace("TRACE", str(folder / "trace.toml"))
    with renting_sailord(folder / "c", config) as place:
        yield place


wait_until = partial(processes.wait_until, within_s=150.0)


def cards(place: LocalFolders) -> list[dict[str, Any]]:
    found = (place.folder / "machines").glob("*/instance.json")
    return [json.loads(path.read_bytes()) for path in found]
