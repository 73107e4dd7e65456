"""Make the virtual environment that every target of the Makefile runs in.

Standard library only, since nothing else is there yet. Parsed by any Python 3, so that an
old one gets a sentence to act on.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
PYTHON_LEAST = (3, 11)


def main(stamp: Path) -> None:
    """Install Sailor with all its groups into ``.venv``, then write the stamp."""
    if sys.version_info < PYTHON_LEAST:
        sys.exit(
            "Sailor needs Python 3.11 or newer and this is {}.{}: "
            "name another one with `make install PYTHON=python3.11`.".format(*sys.version_info)
        )
    # Two makes in one checkout may meet here; the second finds the work done.
    with (ROOT / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists():
            return
        _create()
        # torch comes in a call of its own: its version alone decides which build, CPU or
        # CUDA, the machine gets, before anything else pulls in its dependencies.
        _pip("install", _pin("torch"))
        _pip("install", "-e", f"{ROOT}[gcp,worker,plot,dev]")
        _pip("check")
        # DeepSpeed would compile these during a step, on every rank at once.
        subprocess.run(
            [str(VENV / "bin" / "python"), "-m", "worker.engines.deepspeed.build_ops"], check=True
        )
        for old in VENV.glob(".installed-*"):
            old.unlink()
        stamp.touch()


def _create() -> None:
    # pip is the last thing that an environment gets, so without it one is half made.
    if (VENV / "bin" / "python").exists() and (VENV / "bin" / "pip").exists():
        return
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=False)
    if made.returncode != 0:
        sys.exit(
            "`python3 -m venv` failed: install your distribution's package for it "
            "(on Debian and Ubuntu: `apt-get install python3-venv`), then try again."
        )


def _pin(name: str) -> str:
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line
    raise AssertionError(f"constraints.txt does not pin {name}")


def _pip(*arguments: str) -> None:
    # By environment rather than by -c, so that the pins hold for isolated builds as well.
    # pip splits this variable at blanks, hence the relative path.
    environment = {**os.environ, "PIP_CONSTRAINT": CONSTRAINTS.name, "PIP_NO_INPUT": "1"}
    command = [str(VENV / "bin" / "python"), "-m", "pip", *arguments]
    if arguments[0] == "install":
        command.append("-qq")  # Errors only: warnings are about the machine's pip settings.
    print("+ pip", *arguments, flush=True)
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"`pip {' '.join(arguments)}` failed; the lines above say why.")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
