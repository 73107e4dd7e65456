"""An emulated worker that first tries what a job must not get; it writes down what it got."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes import worker

PRIZES = "SAILOR_PRYING"


def main(spec: Mapping[str, Any]) -> int:
    """Read each file that the environment names, then work."""
    got = {"user": os.getuid(), "parent": os.getppid(), "read": [], "written": [], "killed": []}
    for name in os.environ[PRIZES].split(":"):
        path = Path(name)
        with contextlib.suppress(OSError):
            path.read_bytes() if path.is_file() else os.listdir(path)
            got["read"].append(name)
        with contextlib.suppress(OSError):
            (path / "forged" if path.is_dir() else path).write_bytes(b"forged")
            got["written"].append(name)
    for pid in json.loads(os.environ.get("SAILOR_PIDS", "[]")):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
            got["killed"].append(pid)
    Path(spec["folder"], "got.json").write_text(json.dumps(got))
    return worker.main(dict(spec))
