"""The other end of the control socket of ``sailorctl up``, for ``sailorctl local``."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from sailord.client import ServerProblem

CONTROL_SOCKET = "up.sock"
"""The socket's path within the folder of a local cluster."""
ANSWER_S = 30.0


def ask(path: Path, asked: dict[str, Any]) -> str:
    """Send a request to the launcher; return what it did."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps(asked).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline())
        except (OSError, ValueError):
            what = f"no local cluster answers at {path}; start one with sailorctl up"
            raise ServerProblem(what) from None
    if "problem" in answer:
        raise ServerProblem(answer["problem"])
    return str(answer["done"])
