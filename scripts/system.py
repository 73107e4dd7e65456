"""Lay out what a machine needs to run Sailor under systemd, below a folder of any name.

``python3 scripts/system.py DESTDIR [--group worker]`` builds a version in
``/opt/sailor/versions/NAME``: an environment, and below ``system/`` the commands, units, example
files, documents and completions. Then it puts these into their places and switches to the version
(``scripts/installed.py``, which stays there as ``sailor-system``). ``DESTDIR`` is where the tree is
put together; all that is in it speaks of the places where it will lie, below ``/``. What fails
before the switch leaves an earlier version as it was. ``--files-only`` leaves the environment out.
Standard library only, with pip and venv; nothing of the checkout's ``.venv``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from installed import HOME, Installed

ROOT = Path(__file__).resolve().parent.parent
HOMES = ("/home", "/root", "/run/user")
"""What ``ProtectHome=`` hides from the units."""
COMMANDS = ("sailord", "sailor-agent", "sailorctl")
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/sailorctl",
    "zsh": "usr/share/zsh/vendor-completions/_sailorctl",
    "fish": "usr/share/fish/vendor_completions.d/sailorctl.fish",
}
FILES = {
    "systemd/sailord.service": "usr/lib/systemd/system/sailord.service",
    "systemd/sailor-agent.service": "usr/lib/systemd/system/sailor-agent.service",
    "systemd/sailor-worker.service": "usr/lib/systemd/system/sailor-worker.service",
    "systemd/sailor-failed@.service": "usr/lib/systemd/system/sailor-failed@.service",
    "systemd/sysusers.conf": "usr/lib/sysusers.d/sailor.conf",
    "examples/small.toml": "usr/share/doc/sailor/examples/small.toml",
    "LICENSE": "usr/share/doc/sailor/LICENSE",
}
DOCUMENTS = ("*.md", "adr/*.md", "pictures/*.svg", "pictures/*.png")
"""Of the folder docs; they lie beside each other, as they link to each other."""
CONFIGURATION = {
    "systemd/etc/sailord.toml": "etc/sailor/sailord.toml",
    "systemd/etc/agent.toml": "etc/sailor/agent.toml",
    "examples/three-zones.toml": "etc/sailor/cluster.toml",
}
SCRIPTS = {
    "systemd/tell-shutdown.sh": "usr/lib/sailor/tell-shutdown",
    "systemd/etc/on-failure": "etc/sailor/on-failure",
    "scripts/installed.py": "usr/lib/sailor/installed.py",
}
SOURCES = ("agents", "planner", "sailor", "sailord", "simulator", "worker")
# Nothing below the working folder is taken for a module of Python's or ours.
WRAPPER = """#!/bin/sh
export PYTHONSAFEPATH=1
exec {home}/current/bin/{name} "$@"
"""
SYSTEM_WRAPPER = """#!/bin/sh
exec {python} -I /usr/lib/sailor/installed.py "$@"
"""


def main() -> None:
    """Read the arguments, build a version, and switch to it."""
    os.umask(0o022)  # Other users run what is installed.
    parser = argparse.ArgumentParser(description="Lay Sailor out for systemd.")
    parser.add_argument("destination", type=Path)
    parser.add_argument("--group", action="append", default=[], help="as in pyproject.toml")
    parser.add_argument("--files-only", action="store_true")
    arguments = parser.parse_args()
    problem = None if arguments.files_only else interpreter_problem(sys.executable)
    if problem:
        sys.exit(f"error: {problem}")
    installed = Installed(arguments.destination)
    checksum = _checksum(arguments.group, is_whole=not arguments.files_only)
    name = f"{_project()['version']}-{checksum}"
    if name not in installed.names():
        build(installed.versions / name, arguments.group, files_only=arguments.files_only)
    installed.use(name)


def interpreter_problem(executable: str) -> str | None:
    """Return why the user ``sailor`` could not run this Python, and what to do; None: it could."""
    # Not through the environment's link: through the file that it runs, and its library.
    for path in (Path(executable).resolve(), Path(os.__file__).resolve()):
        is_hidden = any(path.is_relative_to(home) for home in HOMES)
        closed = [each for each in path.parents if not each.stat().st_mode & stat.S_IXOTH]
        if is_hidden or closed:
            why = "is below a home, which the units cannot read"
            if not is_hidden:
                why = f"cannot be read by other users ({closed[-1]} is closed to them)"
            return (
                f"{path} {why}: name the system's Python, make install PYTHON=/usr/bin/python3 ..."
            )
    return None


def build(folder: Path, groups: list[str], *, files_only: bool) -> None:
    """Build a version beside those that are there; it gets its name when it is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    python = sys.executable
    if not files_only:
        alike = [path.parent for path in folder.parent.glob("*/needs") if _is_alike(path, groups)]
        build_environment(partial, HOME / "versions" / folder.name, groups, alike)
        python = str(partial / "bin" / "python")
    write_files(partial / "system", python)
    partial.rename(folder)


def write_files(system: Path, python: str) -> None:
    """Write all but the environment; ``python`` can import Sailor."""
    for source, target in {**FILES, **CONFIGURATION}.items():
        _copy(ROOT / source, system / target)
    for source, target in SCRIPTS.items():
        _copy(ROOT / source, system / target, mode=0o755)
    for path in (path for form in DOCUMENTS for path in (ROOT / "docs").glob(form)):
        below = path.relative_to(ROOT / "docs")
        _copy(path, system / "usr/share/doc/sailor" / below)
    for name in COMMANDS:
        _write(system / "usr/bin" / name, WRAPPER.format(home=HOME, name=name), mode=0o755)
    own = SYSTEM_WRAPPER.format(python=Path(sys.executable).resolve())
    _write(system / "usr/sbin/sailor-system", own, mode=0o755)
    for shell, target in COMPLETIONS.items():
        _write(system / target, _completion(shell, python))


def _completion(shell: str, python: str) -> str:
    said = subprocess.run(
        [python, "-m", "sailord.cli.main", "completion", shell],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return said.stdout


def build_environment(folder: Path, final: Path, groups: list[str], alike: list[Path]) -> None:
    """Build the environment as it will be at its final path.

    From a version that needs the same packages these are taken over, as links to the same files;
    nothing here writes into a file that it did not make.
    """
    if alike:
        made_here = shutil.ignore_patterns("system", "needs")
        folder.rmdir()
        shutil.copytree(alike[0], folder, symlinks=True, copy_function=os.link, ignore=made_here)
    else:
        _run(sys.executable, "-m", "venv", "--without-pip", folder)
    (folder / "needs").write_text(_needs(groups), encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        # pip comes from an environment of its own, so that it is not installed with Sailor.
        tools, source = Path(temporary, "tools"), Path(temporary, "source")
        _run(sys.executable, "-m", "venv", tools)
        left_out = shutil.ignore_patterns(
            ".*", "build", "*.egg-info", "tests", "benchmarks", "docs"
        )
        shutil.copytree(ROOT, source, ignore=left_out)
        pip: list[str | Path] = [tools / "bin/python", "-m", "pip", "--python"]
        pip += [
            folder / "bin/python",
            "install",
            "-qq",
            "--no-compile",
            "--disable-pip-version-check",
        ]
        if alike:
            pip += ["--no-deps", "--force-reinstall"]
        elif {"torch", "worker"} & set(groups):
            # Its version alone decides which build it is, before others pull in what they need.
            _run(*pip, _pin("torch"))
        _run(*pip, f"{source}[{','.join(groups)}]" if groups else source)
    compiled: list[str | Path] = ["-m", "compileall", "-qq", "-j", "0"]
    compiled += ["-s", folder, "-p", final, folder / "lib"]
    _run(folder / "bin/python", *compiled, check=False)  # Some packages hold newer syntax.
    for path in [*(folder / "bin").iterdir(), folder / "pyvenv.cfg"]:
        for earlier in (folder.absolute(), *(HOME / "versions" / each.name for each in alike)):
            _say_last_place(path, earlier, final)


def _needs(groups: list[str]) -> str:
    """Return what the packages of an environment follow from."""
    project = _project()
    needed = project["dependencies"], project["optional-dependencies"]
    made = hashlib.sha256(f"{sys.version} {sorted(groups)} {needed}".encode())
    made.update((ROOT / "constraints.txt").read_bytes())
    return made.hexdigest()


def _is_alike(needs: Path, groups: list[str]) -> bool:
    is_complete = not needs.parent.name.startswith(".")
    return is_complete and needs.read_text(encoding="utf-8") == _needs(groups)


def _run(*command: str | Path, check: bool = True) -> None:
    # The pins hold for isolated builds as well; pip splits this variable at blanks, hence the
    # relative path.
    environment = {**os.environ, "PIP_CONSTRAINT": "constraints.txt", "PIP_NO_INPUT": "1"}
    done = subprocess.run(command, cwd=ROOT, env={**environment, "DS_BUILD_OPS": "0"}, check=False)
    if check and done.returncode != 0:
        said = " ".join(str(part) for part in command)
        sys.exit(f"error: `{said}` failed; the lines above say why. Nothing was changed.")


def _pin(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def _project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def _checksum(groups: list[str], *, is_whole: bool) -> str:
    """Return a hash of all that the version is made of."""
    made = hashlib.sha256(f"{sys.version} {sorted(groups)} {is_whole}".encode())
    given = [*FILES, *CONFIGURATION, *SCRIPTS, "pyproject.toml", "constraints.txt"]
    folders = [(ROOT / name, "**/*") for name in (*SOURCES, "scripts")]
    folders += [(ROOT / "docs", form) for form in DOCUMENTS]
    found = {ROOT / name for name in given}
    found |= {path for folder, form in folders for path in folder.glob(form)}
    for path in sorted(found):
        if path.is_file() and "__pycache__" not in path.parts:
            made.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return made.hexdigest()[:8]


def _say_last_place(path: Path, earlier: Path, final: Path) -> None:
    if path.is_symlink():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    if str(earlier) in text:
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(text.replace(str(earlier), str(final)), encoding="utf-8")
        fresh.chmod(path.stat().st_mode)
        fresh.replace(path)


def _copy(source: Path, target: Path, *, mode: int = 0o644) -> None:
    _write_bytes(target, source.read_bytes(), mode=mode)


def _write(target: Path, text: str, *, mode: int = 0o644) -> None:
    _write_bytes(target, text.encode(), mode=mode)


def _write_bytes(target: Path, content: bytes, *, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    os.chmod(target, mode)


if __name__ == "__main__":
    try:
        main()
    except PermissionError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}: do this as root, with sudo")
    except OSError as error:
        sys.exit(f"error: {error}")
