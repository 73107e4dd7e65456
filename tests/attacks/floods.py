"""Floods of a port by strangers, from a process of their own: ``python -m tests.attacks.floods``.

``KIND PORT CONNECTIONS SECONDS`` floods; its last line counts the answers by status.
"""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
import sys
import time
from collections import Counter

DEPTH = 16
"""Requests that are sent before the first is answered."""


def requests(path: str, **headers: str) -> bytes:
    """Some requests, one behind the other."""
    told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{told}\r\n".encode() * DEPTH


def slow(path: str, header: str, value: str) -> bytes:
    """A request whose body never comes."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{header}: {value}\r\nContent-Length: 60000\r\n\r\n"
    return head.encode()


def opening(kind: str) -> bytes:
    """What a connection of this kind of flood says, again and again if it is answered."""
    now, zeros = f"{time.time():.3f}", "0" * 64
    return {
        "pipelined": requests("/openapi.json"),
        "livez": requests("/livez"),
        "wrong-token": requests("/v1/status", Authorization="Bearer wrong"),
        "unknown": requests("/" + "x" * 4000),
        "half-header": b"GET /livez HTTP/1.1\r\nHost: ",
        "silent": b"",
        "half-body": slow("/v1/agents/report", "Sailor-Signature",
                          f"time={now}, nonce={'0' * 32}, mac={zeros}"),
        "half-body-agent": slow("/v1/abort", "Sailor-Signature",
                                f"time={now}, nonce={'0' * 32}, mac={zeros}"),
        "unsigned-body": slow("/v1/abort", "X-Nothing", "1"),
        "oversize-header": b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000,
        "half-tls": b"\x16\x03\x01\x02\x00\x01",
        "full-tls": requests("/livez"),
        "garbage": b"\x16\x03\x01" + b"\xff" * 2000 + b"\r\n\r\n",
        "webhook": b"POST /v1/webhooks/preemption HTTP/1.1\r\nHost: x\r\nSailor-Webhook: "
                   b"t=1,v1=0\r\nContent-Length: 2\r\n\r\n{}" * DEPTH,
    }[kind]  # fmt: skip


def trusting() -> ssl.SSLContext:
    """A stranger's TLS: without a certificate, and it accepts any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def one(kind: str, port: int, until: float, codes: Counter[str]) -> None:
    """One connection after another."""
    tls = trusting() if kind == "full-tls" else None
    while time.monotonic() < until:
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            while time.monotonic() < until:
                writer.write(opening(kind))
                await writer.drain()
                async with asyncio.timeout(until - time.monotonic() + 0.1):
                    data = await reader.read(1 << 20)
                if not data:
                    codes["closed"] += 1
                    break
                for line in data.split(b"HTTP/1.1 ")[1:]:
                    codes[line[:3].decode("ascii", "replace")] += 1
        except (OSError, TimeoutError, ValueError) as error:
            codes[type(error).__name__] += 1
            await asyncio.sleep(0.05)
        finally:
            if writer is not None:
                writer.close()


async def flood(kind: str, port: int, connections: int, seconds: float) -> Counter[str]:
    """Flood the port."""
    codes: Counter[str] = Counter()
    until = time.monotonic() + seconds
    await asyncio.gather(*(one(kind, port, until, codes) for _ in range(connections)))
    return codes


def main() -> None:
    """Flood, and count."""
    kind, port, connections, seconds = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    codes = asyncio.run(flood(kind, int(port), int(connections), float(seconds)))
    sys.stdout.write(json.dumps(codes) + "\n")


if __name__ == "__main__":
    main()
