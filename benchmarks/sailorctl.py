"""Processor time of commands that ask sailord, compared with a bare Python and another checkout.

    python -m benchmarks.sailorctl [--server unix:///PATH] [--against FOLDER] [--times N]

Prints the least of N runs of each command, in seconds and in bare Pythons. Without a sailord at
the address each command ends with an error; printing an answer adds 1 to 5 ms.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    *("status", "nodes", "jobs", "why j", "history j", "moves j", "doctor", "logs a"),
    *("preempt a", "pause j", "checkpoint ls j", "local kill a", "submit examples/small.toml"),
)


def seconds(words: list[str], root: Path, server: str, times: int) -> float:
    """Return the least processor time of some runs, user and system."""
    found = []
    env = {**os.environ, "PYTHONPATH": str(root), "SAILOR_SERVER": server}
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *words], cwd=root, env=env, capture_output=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def main() -> None:
    """Measure and print one line for each command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--server", default="unix:///nonexistent/sailord.sock")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    bare_s = seconds(["-c", "pass"], ROOT, given.server, given.times)
    print(f"{'bare Python':18} {bare_s:.3f} s")
    for command in COMMANDS:
        words = ["-m", "sailord.cli.main", *command.split()]
        now_s = seconds(words, ROOT, given.server, given.times)
        line = f"{command:18} {now_s:.3f} s  {now_s / bare_s:4.1f} bare Pythons"
        if given.against is not None:
            then_s = seconds(words, given.against.resolve(), given.server, given.times)
            line += f"  against {then_s:.3f} s: {then_s / now_s:.1f} times less"
        print(line, flush=True)


if __name__ == "__main__":
    main()
