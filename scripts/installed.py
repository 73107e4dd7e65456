"""The versions of Sailor that are installed on this machine: switch, roll back, delete.

``scripts/system.py`` puts each version into a folder of its own,
``/opt/sailor/versions/NAME``: an environment, and below ``system/`` a copy of every file that
lies elsewhere. The link ``/opt/sailor/current`` names the version that the commands run. So each
step is one rename, and a command answers at every moment. Installed as ``sailor-system``. Standard
library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HOME = Path("/opt/sailor")
CONFIGURATION = Path("etc/sailor")
"""What lies here is the operator's: never overwritten, and removed by --purge only."""
WORKERS = "sailor-worker.service"
UNITS = ("sailor-agent.service", "sailord.service", WORKERS)
USERS = ("sailor", "sailor-worker")
ENDING_S = 5.0
STATE = (
    *("etc/sailor", "var/lib/sailor", "var/lib/sailor-agent", "var/lib/sailor-worker"),
    *("run/sailor", "run/sailor-agent", "run/sailor-worker"),
)


def main() -> None:
    """Read the arguments, and do as they say."""
    os.umask(0o022)  # Other users run what is installed.
    parser = argparse.ArgumentParser(prog="sailor-system", description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("/"), help="a tree other than /")
    orders = parser.add_subparsers(dest="order", required=True)
    orders.add_parser("versions", help="list the installed versions")
    use = orders.add_parser("use", help="switch to an installed version")
    use.add_argument("version")
    orders.add_parser("rollback", help="switch to the version that was used before")
    orders.add_parser("prune", help="delete all versions but the current and the previous")
    uninstall = orders.add_parser("uninstall", help="remove Sailor; leaves configuration and state")
    uninstall.add_argument("--purge", action="store_true", help="remove these and the user, too")
    arguments = parser.parse_args()
    installed = Installed(arguments.root)
    match arguments.order:
        case "versions":
            for name in installed.names():
                used = {installed.current: "current", installed.previous: "previous"}.get(name, "")
                print(f"{name}  {used}".rstrip())
        case "use":
            installed.use(arguments.version)
        case "rollback":
            if installed.previous is None:
                sys.exit("error: no version was used before: see sailor-system versions")
            installed.use(installed.previous)
        case "prune":
            installed.prune()
        case _:
            installed.uninstall(purge=arguments.purge)


class Installed:
    """What is installed below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.home = self.root / HOME.relative_to("/")
        self.versions = self.home / "versions"

    def names(self) -> list[str]:
        """Return the installed versions, oldest first."""
        found = [path for path in self.versions.glob("*") if not path.name.startswith(".")]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime)]

    @property
    def current(self) -> str | None:
        """The version that the commands run."""
        return self._target("current")

    @property
    def previous(self) -> str | None:
        """The version that they ran before."""
        return self._target("previous")

    def _target(self, link: str) -> str | None:
        try:
            return Path(os.readlink(self.home / link)).name
        except OSError:
            return None

    def use(self, name: str) -> None:
        """Put the version's files in place, then let the commands run it."""
        self._check(name)
        old = self.current
        new_files = dict(self._files(name))
        old_files = dict(self._files(old)) if old else {}
        for relative, source in new_files.items():
            target = self.root / relative
            if CONFIGURATION not in relative.parents or not target.exists():
                _replace(source, target)
        self._link("current", name)
        if old not in (None, name):
            self._link("previous", old)
        for relative in old_files.keys() - new_files.keys():
            if CONFIGURATION not in relative.parents:
                self._delete(relative)
        print(f"{name} is in use below {self.root}")
        if self._is_running_system():
            print("next: systemd-sysusers && systemctl daemon-reload")
            print("      systemctl restart sailord sailor-agent")
            print("      (those that run on this machine; training goes on)")

    def prune(self) -> None:
        """Delete every version but the current and the previous one, unless processes use it."""
        for name in self.names():
            if name in (self.current, self.previous):
                continue
            if pids := _users(self.versions / name):
                print(f"{name} stays: process {', '.join(pids)} uses it")
            else:
                shutil.rmtree(self.versions / name)
                print(f"{name} is deleted")

    def uninstall(self, *, purge: bool) -> None:
        """Stop the units, then remove every file of every version."""
        if self._is_running_system():
            others = [unit for unit in UNITS if unit != WORKERS]
            subprocess.run(["systemctl", "disable", "--now", "-q", *others], check=False)
            end_s = time.monotonic() + ENDING_S
            while (pids := self._workers()) and time.monotonic() < end_s:
                time.sleep(0.2)  # Planners, or what forks workers, may still be ending.
            if pids:
                sys.exit(
                    f"error: workers run on (process {', '.join(pids)}): cancel or move their job,"
                    " or kill them; then once more"
                )
            subprocess.run(["systemctl", "stop", "-q", WORKERS], check=False)
        for relative in {each for name in self.names() for each, _ in self._files(name)}:
            if CONFIGURATION not in relative.parents:
                self._delete(relative)
        shutil.rmtree(self.home, ignore_errors=True)
        if purge:
            for place in STATE:
                shutil.rmtree(self.root / place, ignore_errors=True)
            for folder in (self.root / "dev" / "shm").glob("sailor-*"):
                shutil.rmtree(folder, ignore_errors=True)
            for credential in (self.root / "etc/credstore").glob("sailor.*"):
                credential.unlink()
        if self._is_running_system():
            subprocess.run(["systemctl", "daemon-reload"], check=False)
            subprocess.run(["systemctl", "reset-failed", *UNITS], check=False, capture_output=True)
            if purge:
                for user in USERS:
                    subprocess.run(["userdel", user], check=False)
        left = [f"/{each}" for each in STATE if (self.root / each).exists()]
        print(
            "removed"
            + (f"; what stays: {', '.join(left)} (make uninstall PURGE=1)" if left else "")
        )

    def _workers(self) -> list[str]:
        """Return the processes of our versions, but for the service that waits for workers."""
        command = ["systemctl", "show", "--value", "-p", "MainPID", WORKERS]
        main = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
        return [pid for pid in _users(self.versions) if pid != main]

    def _check(self, name: str) -> None:
        if name not in self.names():
            known = ", ".join(self.names()) or "none"
            sys.exit(f"error: {name} is not installed; installed are: {known}")

    def _files(self, name: str) -> Iterator[tuple[Path, Path]]:
        """Yield where each file of a version lies, and its copy in the version's folder."""
        folder = self.versions / name / "system"
        for source in sorted(folder.rglob("*")):
            if source.is_file():
                yield source.relative_to(folder), source

    def _link(self, link: str, name: str) -> None:
        temporary = self.home / f".{link}.new"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(f"versions/{name}")
        os.replace(temporary, self.home / link)

    def _delete(self, relative: Path) -> None:
        """Delete a file, and the folders that are empty then."""
        (self.root / relative).unlink(missing_ok=True)
        for parent in relative.parents[:-2]:  # /usr, /etc and the root stay.
            try:
                (self.root / parent).rmdir()
            except OSError:
                return

    def _is_running_system(self) -> bool:
        return self.root == Path("/") and Path("/run/systemd/system").exists()


def _replace(source: Path, target: Path) -> None:
    """Copy a file with its mode; a reader finds the old or the new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")
    shutil.copy(source, temporary)
    os.replace(temporary, target)


def _users(folder: Path) -> list[str]:
    """Return the processes that were started from a folder."""
    return [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"{folder.resolve()}/".encode() in _read(path)
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    try:
        main()
    except PermissionError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}: do this as root, with sudo")
    except OSError as error:
        sys.exit(f"error: {error}")
