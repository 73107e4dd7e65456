"""Notifications to systemd, and a query of the system's state; without systemd they do nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

ANSWER_S = 1.0


def notify(text: str) -> None:
    """Send ``READY=1``, ``WATCHDOG=1``, ``STATUS=...`` or ``STOPPING=1``."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.setblocking(False)
        try:
            out.sendto(text.encode(), address)
        except OSError:
            return  # Lost; the next notification follows soon.


async def is_shutting_down() -> bool:
    """Return whether the whole system shuts down, and not this service alone."""
    try:
        asked = await asyncio.create_subprocess_exec(
            *("systemctl", "is-system-running"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return False
    try:
        said, _ = await asyncio.wait_for(asked.communicate(), ANSWER_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            asked.kill()
        return False
    return said.strip() == b"stopping"
