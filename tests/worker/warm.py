"""Runs ``python -m worker`` many times from one process that has imported torch.

Starting Python with torch takes seconds, a fork milliseconds. The server process reads arguments,
forks for each command, and reports its result and any process that it left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_SERVER = '''
import ctypes, json, os, sys, time, traceback
sys.argv = ["worker"]
import worker.__main__
from worker.cli.main import main
from worker.control.preload import preload
preload()
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: who is left behind becomes our child.

def children():
    """Who was left behind and still lives."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    return [int(pid) for pid in open("/proc/self/task/%d/children" % os.getpid()).read().split()]

for line in sys.stdin:
    case = json.loads(line)
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(case[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if case["gone"]:
            reading, writing = os.pipe()
            os.dup2(writing, 1)
            os.close(reading)
            os.close(writing)
        os.environ.update(case["env"])
        sys.argv = ["worker", *case["args"]]
        code = 99
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(json.dumps({"pid": pid}), flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    answer = {"code": code, "seconds": time.monotonic() - begin, "left": children()}
    print(json.dumps(answer), flush=True)
'''


@dataclass(frozen=True, slots=True)
class Done:
    """The result of one command."""

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
    """The server process."""

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
        self._running: int | None = None

    def run(self, *args: str | Path, reader_is_gone: bool = False, **env: str) -> Done:
        """Run a command to its end."""
        self.start(*args, reader_is_gone=reader_is_gone, **env)
        return self.end()

    def start(self, *args: str | Path, reader_is_gone: bool = False, **env: str) -> int:
        """Start a command and return its process id."""
        if self._running is not None:  # A failed test did not wait for it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._running, signal.SIGKILL)
            self._heard()
        told = self._process.stdin
        assert told is not None
        self._out.unlink(missing_ok=True)
        case = {"args": [str(arg) for arg in args], "env": env, "gone": reader_is_gone}
        told.write(json.dumps({**case, "out": str(self._out), "err": str(self._err)}) + "\n")
        told.flush()
        self._running = self._heard()["pid"]
        return self._running

    def wait_for_output(self) -> None:
        """Wait until the command has written a line."""
        process = Path(f"/proc/{self._running}")
        while not (self._out.exists() and "\n" in self._out.read_text()):
            assert process.exists(), f"it ended without a line: {self._err.read_text()}"
            time.sleep(0.01)

    def end(self) -> Done:
        """Wait for the command and return its result."""
        answer = self._heard()
        self._running = None
        return Done(out=self._out.read_text(), err=self._err.read_text(), **answer)

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()
