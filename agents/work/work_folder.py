"""One unpacked work folder on a node, and the environment that its setup commands made.

What is unpacked and set up depends on the package, the commands and the mounts alone, so jobs that
share them share the folder. It is complete once the file ``ready`` is there; an incomplete one is
made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import kill_all
from simulator.spec.job import Work
from worker.atomic_file import replace_file

KEPT = 4
"""How many work folders, packages and copies of data stay on a node."""
SETUP = "SAILOR_SETUP"
"""Marks the processes of setup commands: the folder that they prepare."""
UNFINISHED = "unfinished-"
"""Prefix of the names of incomplete copies."""


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """The folder of a package and its setup."""

    home: Path

    @property
    def files(self) -> Path:
        """The unpacked package: where the script runs."""
        return self.home / "work"

    @property
    def environment(self) -> Path:
        """The virtual environment; not there if there are no setup commands."""
        return self.home / "env"

    @property
    def constraints(self) -> Path:
        """The versions that ``pip`` may install, if this node is not the job's first."""
        return self.home / "constraints.txt"

    @property
    def log(self) -> Path:
        """The file with the output of the setup commands."""
        return self.home / "setup.log"

    @property
    def is_ready(self) -> bool:
        return (self.home / "ready").exists()

    def begin(self) -> None:
        """Delete what an earlier attempt has left.

        Its commands may still run, if the agent was killed; they would write into the new folder.
        """
        kill_all(self.home, SETUP)
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)

    def share(self, *, with_environment: bool) -> None:
        """Let workers of another user, which has our group, write into the unpacked folder."""
        if with_environment:
            self.environment.mkdir()
            self.environment.chmod(0o770)
        for folder, _, files in os.walk(self.files):
            os.chmod(folder, 0o770)
            for path in (Path(folder, name) for name in files):
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode | 0o060)

    def reject(self) -> None:
        """Mark it, so that the next attempt makes it anew."""
        (self.home / "ready").unlink(missing_ok=True)

    def finish(self) -> None:
        """Mark it as complete, also after a power failure."""
        os.sync()
        replace_file(self.home / "ready", b"")


def work_folder(base: Path, work: Work) -> WorkFolder:
    """Return the folder of a job's work below ``base``."""
    key = hashlib.sha256(json.dumps([work.package, work.setup, work.mounts]).encode()).hexdigest()
    return WorkFolder(base / key[:24])


def worker_view(folder: WorkFolder, secrets: Mapping[str, Path | None]) -> dict[str, Any]:
    """Return what a worker needs to know about its work folder, as plain values for JSON.

    ``secrets`` are the files of the secrets; ``None``: the agent's environment has its value.
    """
    has_environment = folder.environment.exists()
    return {
        "folder": str(folder.files),
        "environment": str(folder.environment),
        "packages": str(packages_of(folder.environment)) if has_environment else "",
        "secrets": {name: str(path or "") for name, path in secrets.items()},
    }


def packages_of(environment: Path) -> Path:
    """Return the folder of the packages of a virtual environment."""
    found = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", vars=found))


def delete_old(base: Path, keep: Collection[Path]) -> None:
    """Delete the oldest entries of a folder beyond ``KEPT``, but none of ``keep``."""
    found = [
        path for path in base.glob("*") if path not in keep and not path.name.startswith(UNFINISHED)
    ]
    found.sort(key=lambda path: path.stat().st_mtime)
    for path in found[: max(len(found) + len(keep) - KEPT, 0)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
