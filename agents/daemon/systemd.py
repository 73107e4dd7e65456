"""Notifications to systemd; without systemd they do nothing."""

from __future__ import annotations

import os
import socket


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
