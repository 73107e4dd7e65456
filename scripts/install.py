"""Make the virtual environment that the Makefile's targets run in, and say how far it is.

``python3 scripts/install.py .venv/.installed-LEVEL-HASH`` installs what a level needs, then writes
that stamp. Levels: ``plan`` is for planning and its pictures, ``up`` for training on this machine,
``all`` is everything, with what the tests and checks need. Nothing is compiled. Standard library
only, since nothing else is there yet; parsed by any Python 3, so that an old one gets a sentence
to act on.
"""

from __future__ import annotations

import fcntl
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
PYTHON_LEAST = (3, 11)
LEVELS = {
    "plan": ("[plot]", "sailorctl, sailord and matplotlib", "half a minute"),
    "up": ("[torch]", "sailorctl, sailord and PyTorch", "a minute"),
    "all": (
        "[gcp,s3,worker,plot,dev]",
        "Sailor, all its groups, and the tools for tests",
        "3 minutes",
    ),
}
"""The groups of pyproject.toml that a level needs, what that is, and how long it takes."""
SILENCE_MAX_S = 5.0

begin_s = time.monotonic()


def main(stamp: Path) -> None:
    """Install a level into ``.venv``, then write its stamp."""
    if sys.version_info < PYTHON_LEAST:
        sys.exit(
            "Sailor needs Python 3.11 or newer and this is {}.{}: "
            "name another one with `make install PYTHON=python3.11`.".format(*sys.version_info)
        )
    _, level, checksum = stamp.name.rsplit("-", 2)
    # Two makes in one checkout may meet here; the second finds the work done.
    with (ROOT / ".venv.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another make installs here; waiting for it to finish.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists():
            return
        _install(level)
        for old in VENV.glob(".installed-*"):
            if not old.name.endswith(checksum):
                old.unlink()
        for done in LEVELS if level == "all" else (level,):
            stamp.with_name(f".installed-{done}-{checksum}").touch()
    print(f"Installed in {_elapsed()}.", flush=True)


def _install(level: str) -> None:
    groups, what, takes = LEVELS[level]
    print(
        f"Installing into .venv, once: {what}; about {takes} with a fast network.\n"
        "Needed: this Python {}.{} with venv, and a package registry that pip can reach. "
        "Nothing is compiled.".format(*sys.version_info),
        flush=True,
    )
    has_torch = level != "plan"
    steps = 4 if has_torch else 3
    _say(f"[1 of {steps}] a virtual environment")
    _create()
    if has_torch:
        # torch comes in a call of its own: its version alone decides which build, CPU or
        # CUDA, the machine gets, before anything else pulls in its dependencies.
        _say(f"[2 of {steps}] PyTorch, the largest part: about 200 MB, with CUDA 3 GB")
        _pip("install", _pin("torch"))
    _say(f"[{steps - 1} of {steps}] Sailor and the other packages")
    _pip("install", "-e", f"{ROOT}{groups}")
    _say(f"[{steps} of {steps}] do the versions fit together?")
    _pip("check")


def _create() -> None:
    # pip is the last thing that an environment gets, so without it one is half made.
    if (VENV / "bin" / "python").exists() and (VENV / "bin" / "pip").exists():
        if is_made_for(VENV, sys.version_info[:2]):
            return
        _say("    anew: the one here is for another folder or another Python")
    if _run([sys.executable, "-m", "venv", "--clear", str(VENV)]) != 0:
        sys.exit(
            "`python3 -m venv` failed: install your distribution's package for it "
            "(on Debian and Ubuntu: `apt-get install python3-venv`), then try again."
        )


def is_made_for(venv: Path, version: tuple[int, int]) -> bool:
    """Return whether an environment's commands work: it may have been copied or moved here."""
    try:
        lines = (venv / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    said = {
        name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)
    }
    is_here = said.get("command", f" {venv}").endswith(f" {venv}")
    return is_here and said.get("version", "").split(".")[:2] == [str(each) for each in version]


def _pin(name: str) -> str:
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line
    raise AssertionError(f"constraints.txt does not pin {name}")


def _pip(*arguments: str) -> None:
    if _run([str(VENV / "bin" / "python"), "-m", "pip", *arguments]) != 0:
        sys.exit(f"`pip {' '.join(arguments)}` failed; the lines above say why.")


def _run(command: list[str]) -> int:
    """Run a command, show its progress, and return its exit code; show all output if it failed."""
    # By environment rather than by -c, so that the pins hold for isolated builds as well.
    # pip splits this variable at blanks, hence the relative path.
    environment = {
        **os.environ,
        "PIP_CONSTRAINT": CONSTRAINTS.name,
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "DS_BUILD_OPS": "0",
    }
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    said, at, found = [], f"at {command[2]}", 0
    told_s = time.monotonic()
    while True:
        if time.monotonic() >= told_s + SILENCE_MAX_S:
            _say(f"    still {at}")
            told_s = time.monotonic()
        try:
            line = lines.get(timeout=max(0.0, told_s + SILENCE_MAX_S - time.monotonic()))
        except queue.Empty:
            continue
        if line is None:
            break
        said.append(line)
        if line.startswith("Collecting "):
            found += 1
            at = f"at package {found}, {line.split()[1]}"
        if (step := _step(line)) and step != at:
            at, told_s = step, time.monotonic()
            _say(f"    {step}")
    code = process.wait()
    if code != 0:
        print("\n".join(said), flush=True)
    return code


def _step(line: str) -> str | None:
    """Say in a few words what a line of pip's means, if it is worth a line of ours."""
    if found := re.match(r"\s*(?:Downloading|Using cached) (\S+) \((\S+ \S+)\)", line):
        name, size = found[1].rsplit("/", 1)[-1], found[2]
        is_large = size.endswith("GB") or (size.endswith("MB") and float(size.split()[0]) >= 3)
        return f"downloading {'-'.join(name.split('-')[:2])}, {size}" if is_large else None
    if found := re.match(r"Installing collected packages: (.*)", line):
        return f"writing {len(found[1].split(','))} packages"
    if found := re.match(r"\s*(?:Building wheel|Building editable|Preparing \w+) for (\S+)", line):
        return f"packing {found[1]}"
    return None


def _say(text: str) -> None:
    print(f"{_elapsed():>7}  {text}", flush=True)


def _elapsed() -> str:
    return f"{time.monotonic() - begin_s:.0f} s"


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).absolute())
    except KeyboardInterrupt:
        sys.exit("Interrupted; the next make goes on from here.")
