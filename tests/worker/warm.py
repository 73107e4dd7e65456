"""``python -m worker`` many times over, from one process that has loaded torch already.

A start takes seconds, nearly all of it for torch; a fork of who has it takes milliseconds. So a
process of our own waits for arguments, forks for each, and tells what came of it, including
whatever process was left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_SERVER = """
import ctypes, json, os, sys, time
sys.argv = ["worker"]
import worker.__main__
from worker.command import main
from worker.rank import warm_up
warm_up()
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: who is left behind becomes our child.

def children():
    return [int(pid) for pid in open("/proc/self/task/%d/children" % os.getpid()).read().split()]

for line in sys.stdin:
    case = json.loads(line)
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(case[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(case["env"])
        sys.argv = ["worker", *case["args"]]
        code = 99
        try:
            code = main()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    answer = {"code": code, "seconds": time.monotonic() - begin, "left": children()}
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Done:
    """What one command came to."""

    code: int
    out: str
    err: str
    seconds: float
    left: list[int]
    """Processes that it left behind."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Warm:
    """The process that has torch loaded."""

    def __init__(self, folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str | Path, **env: str) -> Done:
        """Run a command to its end."""
        case = {
            "args": [str(arg) for arg in args],
            "env": env,
            "out": str(self._out),
            "err": str(self._err),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Done(out=self._out.read_text(), err=self._err.read_text(), **answer)

    def close(self) -> None:
        self._process.communicate()
