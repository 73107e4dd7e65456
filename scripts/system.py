"""Lay out what a machine needs to run Sailor under systemd, below a folder of any name.

``python scripts/system.py DESTDIR [--group worker]`` writes the commands, units, example files
and completions, and an environment of its own at ``/opt/sailor``. ``DESTDIR`` is where the tree
is put together; all that is in it speaks of the places where it will lie, below ``/``.
``--files-only`` leaves the environment out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = Path("/opt/sailor")
COMMANDS = ("sailord", "sailor-agent", "sailorctl")
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/sailorctl",
    "zsh": "usr/share/zsh/vendor-completions/_sailorctl",
    "fish": "usr/share/fish/vendor_completions.d/sailorctl.fish",
}
FILES = {
    "systemd/sailord.service": "usr/lib/systemd/system/sailord.service",
    "systemd/sailor-agent.service": "usr/lib/systemd/system/sailor-agent.service",
    "systemd/sysusers.conf": "usr/lib/sysusers.d/sailor.conf",
    "LICENSE": "usr/share/doc/sailor/LICENSE",
}
DOCUMENTS = ("*.md", "adr/*.md", "pictures/*.svg")
"""Of the folder docs; they lie beside each other, as they link to each other."""
CONFIGURATION = {
    "systemd/etc/sailord.toml": "etc/sailor/sailord.toml",
    "systemd/etc/agent.toml": "etc/sailor/agent.toml",
    "examples/three-zones.toml": "etc/sailor/cluster.toml",
}
# Nothing below the working folder is taken for a module of Python's or ours.
WRAPPER = """#!/bin/sh
export PYTHONSAFEPATH=1
exec {home}/bin/{name} "$@"
"""


def main() -> None:
    """Read the arguments and lay everything out."""
    parser = argparse.ArgumentParser(description="Lay Sailor out for systemd.")
    parser.add_argument("destination", type=Path)
    parser.add_argument("--group", action="append", default=[], help="as in pyproject.toml")
    parser.add_argument("--files-only", action="store_true")
    arguments = parser.parse_args()
    lay_out_files(arguments.destination)
    if not arguments.files_only:
        lay_out_environment(arguments.destination, arguments.group)
    print(f"laid out below {arguments.destination}")


def lay_out_files(destination: Path) -> None:
    """Write all but the environment. A configuration that is there already is left as it is."""
    for source, target in FILES.items():
        _copy(ROOT / source, destination / target)
    for path in (path for form in DOCUMENTS for path in (ROOT / "docs").glob(form)):
        name = path.relative_to(ROOT / "docs")
        _copy(path, destination / "usr/share/doc/sailor" / name)
    for source, target in CONFIGURATION.items():
        if not (destination / target).exists():
            _copy(ROOT / source, destination / target)
    for name in COMMANDS:
        wrapper = WRAPPER.format(home=HOME, name=name)
        _write(destination / "usr" / "bin" / name, wrapper, mode=0o755)
    for shell, target in COMPLETIONS.items():
        _write(destination / target, _completion(shell))


def _completion(shell: str) -> str:
    said = subprocess.run(
        [sys.executable, "-m", "sailord.cli.main", "completion", shell],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return said.stdout


def lay_out_environment(destination: Path, groups: list[str]) -> None:
    """Build the environment as it will be at its final path."""
    home = destination / HOME.relative_to("/")
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = _build_wheel(Path(folder))
        wanted = f"{wheel}[{','.join(groups)}]" if groups else str(wheel)
        pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "-qq"]
        pins = ["--constraint", ROOT / "constraints.txt", "--no-compile"]
        subprocess.run([*pip, *pins, wanted], check=True)
    for path in [*(home / "bin").iterdir(), home / "pyvenv.cfg"]:
        _say_last_place(path, home)


def _build_wheel(folder: Path) -> Path:
    """Build in a copy: what an earlier build left in the checkout would go into this one."""
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "tests", "benchmarks", "docs")
    shutil.copytree(ROOT, folder / "source", ignore=left_out)
    # Without isolation, so with the pins of the environment that runs this.
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "source"]
    done = subprocess.run([sys.executable, *build], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"the wheel cannot be built:\n{done.stdout}{done.stderr}")
    return next(folder.glob("*.whl"))


def _say_last_place(path: Path, home: Path) -> None:
    if path.is_symlink():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    path.write_text(text.replace(str(home.absolute()), str(HOME)), encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    _write(target, source.read_text(encoding="utf-8"))


def _write(target: Path, text: str, *, mode: int = 0o644) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    os.chmod(target, mode)


if __name__ == "__main__":
    main()
