"""The tree that is booted: Debian, with Sailor installed by the documented commands; cached."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.booted.container import MARK, DrillError, refuse_own_system

ROOT = Path(__file__).resolve().parent.parent.parent
SUITE = "bookworm"
PYTHON = "/usr/bin/python3"
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "python3", "python3-venv", "openssl"),
    *("etcd-server", "iproute2", "procps"),
)
TOOLS = {"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container"}
"""A command, and the package that has it."""
INSTALLED = "installed"
HOSTS = "127.0.0.1 localhost\n"


class MachineError(Exception):
    """This machine lacks what a booted system needs; says what."""


def cache_folder() -> Path:
    """Return the folder for trees, which may have gigabytes."""
    named = os.environ.get("SAILOR_UNITS_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "sailor" / "units"


def check_machine() -> None:
    """Say all that this machine lacks."""
    lacks = []
    if os.geteuid() != 0:
        lacks.append("it needs root, for mounts and namespaces")
    elif subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        lacks.append("no mount namespace can be made (unshare -m)")
    for name in ("unshare", "nsenter", "dpkg", "apt-get"):
        if shutil.which(name) is None:
            lacks.append(f"there is no {name}")
    if not Path(PYTHON).exists():
        lacks.append(f"there is no {PYTHON}")
    if lacks:
        raise MachineError("; ".join(lacks))


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Only one run at a time uses the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def tool(cache: Path, name: str) -> Path:
    """Return a command, from a package that is unpacked but not installed if need be."""
    if found := shutil.which(name):
        return Path(found)
    tools = cache / "tools"
    for folder in ("usr/bin", "usr/sbin"):
        if (tools / folder / name).exists():
            return tools / folder / name
    debs = cache / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    _run("apt-get", "download", "-qq", TOOLS[name], cwd=debs, why=f"{TOOLS[name]} cannot be had")
    for deb in debs.glob(f"{TOOLS[name]}_*.deb"):
        _run("dpkg", "-x", str(deb), str(tools), why=f"{deb} cannot be unpacked")
    return tool(cache, name)


def mirror() -> str:
    """Return the address of the Debian mirror that apt uses here."""
    asked = ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    for line in said.splitlines():
        site, _, suite = line.partition(" ")
        if suite == SUITE:
            return site
    raise MachineError(f"apt knows no mirror of Debian {SUITE}; name one with --mirror")


def is_cached(cache: Path) -> bool:
    """Return whether both trees are there, so that the drills take minutes."""
    return _base(cache).exists() and (cache / INSTALLED / MARK).exists()


def _base(cache: Path) -> Path:
    sign = hashlib.sha256(" ".join((SUITE, *PACKAGES)).encode()).hexdigest()[:8]
    return cache / f"base-{sign}"


def base_tree(cache: Path, mirror_url: str | None) -> Path:
    """Return a tree with Debian and nothing of ours."""
    base = _base(cache)
    if base.exists():
        return base
    partial = cache / f".{base.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    debootstrap = tool(cache, "debootstrap")
    scripts = debootstrap.parent.parent / "share" / "debootstrap"
    _say(f"Debian {SUITE} is put together, once: about 2 minutes, 350 MB")
    _run(
        *("unshare", "-m", str(debootstrap), "--variant=minbase"),
        *(f"--include={','.join(PACKAGES)}", SUITE, str(partial), mirror_url or mirror()),
        why=f"debootstrap failed (its log: {partial}/debootstrap/debootstrap.log)",
        environment={"DEBOOTSTRAP_DIR": str(scripts)},
    )
    (partial / "etc/hostname").write_text("units\n")
    (partial / "etc/hosts").write_text(HOSTS)
    (partial / MARK).write_text("A tree of `make units`.\n")
    for unit in ("etcd.service", "systemd-timesyncd.service", "apt-daily.timer"):
        (partial / "etc/systemd/system" / unit).symlink_to("/dev/null")
    partial.rename(base)
    return base


def installed_tree(cache: Path, base: Path) -> Path:
    """Return a copy of the base with this checkout installed for GPU nodes, as documented."""
    tree = cache / INSTALLED
    if not (tree / MARK).exists():
        shutil.rmtree(tree, ignore_errors=True)
        _run("cp", "-a", "--reflink=auto", str(base), str(tree), why="the tree cannot be copied")
    refuse_own_system(tree)
    _say("this checkout is installed in the tree: about a minute, if it changed")
    make = ("make", "--no-print-directory", "install", f"PYTHON={PYTHON}", f"DESTDIR={tree}")
    try:
        _run(*make, "GROUPS=worker", cwd=ROOT, why="`make install` failed")
    except MachineError as error:
        raise DrillError(str(error)) from None  # Ours to mend.
    # An edit that was installed yesterday need not stay.
    current = (tree / "opt/sailor/current").resolve()
    for version in (tree / "opt/sailor/versions").iterdir():
        if version != current:
            shutil.rmtree(version)
    (tree / "opt/sailor/previous").unlink(missing_ok=True)
    return tree


def _run(
    *command: str, why: str, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> None:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise MachineError(f"{why}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
