"""Bodies that are too long, too deep, or grow when they are unpacked: sailord stays small."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import zlib
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, TOKEN, Place

DEEP = 100_000
GROWN_MB_MAX = 150.0
"""Of sailord's highest memory use, by all of it together."""


def bomb(size: int, *, as_deflate: bool = False) -> bytes:
    zeros = b'{"job": "' + bytes(size)
    return zlib.compress(zeros, 9) if as_deflate else gzip.compress(zeros, 9)


def chunked(body: bytes, times: int) -> bytes:
    return (f"{len(body):x}\r\n".encode() + body + b"\r\n") * times


def post(place: Place, path: str, headers: dict[str, str], body: bytes) -> int:
    """Send all that the other end takes; return the status, or 0 if it just closed."""
    told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{told}\r\n"
    with socket.create_connection(("127.0.0.1", place.port), timeout=60) as wire:
        with contextlib.suppress(OSError):  # It has closed: the answer may be there.
            wire.sendall(head.encode() + body)
        try:
            said = wire.recv(4096)
        except OSError:
            return 0
    return int(said.split(b" ", 2)[1]) if said else 0


def highest_mb(place: Place) -> float:
    text = Path(f"/proc/{place.processes[0].pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.slow
def test_bodies_neither_fill_the_memory_nor_end_sailord(head, cost):
    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "first"})[0] == 201
    before, kind = highest_mb(head), {"Content-Type": "application/json"}
    nested = {
        "json list": b"[" * DEEP,
        "json object": b'{"a":' * DEEP,
        "closed json": b'{"job": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        "toml list": json.dumps({"job": "a = " + "[" * DEEP}).encode(),
        "toml table": json.dumps({"job": "[" + "a." * DEEP + "a]"}).encode(),
        "toml inline": json.dumps({"job": "a = " + "{b = " * DEEP}).encode(),
        "toml digits": json.dumps({"job": "a = " + "9" * DEEP}).encode(),
        "numbers": b'{"job": "x", "priority": ' + b"9" * DEEP + b"}",
        "not unicode": b'{"job": "\xff\xfe"}',
        "lone surrogate": b'{"job": "\\ud800"}',
    }
    codes = {}
    for name, body in nested.items():
        sized = kind | {"Content-Length": str(len(body))}
        codes[name] = post(head, "/v1/jobs", sized, body)
    streamed = kind | {"Transfer-Encoding": "chunked"}
    codes["endless chunks"] = post(head, "/v1/jobs", streamed, chunked(bytes(1 << 20), 64))
    for encoding in ("gzip", "deflate"):
        body = bomb(1 << 28, as_deflate=encoding == "deflate")
        packed = kind | {"Content-Encoding": encoding, "Content-Length": str(len(body))}
        codes[f"{encoding} bomb"] = post(head, "/v1/jobs", packed, body)
        package = f"/v1/packages/{'0' * 64}-{1 << 20}/0"
        codes[f"{encoding} part"] = post(head, package, packed, body)
    assert set(codes.values()) <= {0, 400, 404, 405, 413, 422}, codes
    assert {codes[name] for name in nested} <= {400, 413, 422}, codes
    grown = highest_mb(head) - before
    assert grown < GROWN_MB_MAX, codes
    log = (head.folder / "head.log").read_text()
    assert "Traceback" not in log
    assert "internal error" not in log
    wait_until(lambda: head.status()["leads"])
    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "last"})[0] == 201
    cost(f"bodies too deep, too long, bombs: {len(codes)}", "not tried",
         f"refused; memory grew by {grown:.0f} MB at most")  # fmt: skip
