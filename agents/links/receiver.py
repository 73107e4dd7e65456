"""The receiving end of a measurement: one port, open for its flows and seconds only."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field

from agents.links.exchange import LinkBroken, exchange
from agents.links.frames import (
    HEADER_BYTES,
    RECEIPT,
    SECRET_BYTES,
    read_header,
    receive_exactly,
    send_all,
)
from agents.links.traffic import busy
from agents.protocol.link_records import Listening, ListenOrder

FLOWS_MAX = 16
SECONDS_MAX = 60.0
CONNECT_S = 5.0
"""The sender connects within this time."""
STRANGERS_MAX = 8
"""Connections without the secret, after which the port closes."""


@dataclass(eq=False)
class Receiver:
    """Listens for measurements, one at a time."""

    host: str
    _thread: threading.Thread | None = field(default=None)

    async def listen(self, order: ListenOrder) -> Listening:
        """Open a port for one measurement."""
        if self._thread is not None and self._thread.is_alive():
            return Listening(busy="takes part in another measurement")
        why = await busy(order.quiet_bytes_per_s, order.look_s)
        if why:
            return Listening(busy=why)
        secret = secrets.token_bytes(SECRET_BYTES)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, 0), family=family, backlog=FLOWS_MAX)
        self._thread = threading.Thread(
            target=_serve, args=(listener, secret, order), name="link-receiver", daemon=True
        )
        self._thread.start()
        return Listening(int(listener.getsockname()[1]), secret)


def _serve(listener: socket.socket, secret: bytes, order: ListenOrder) -> None:
    """Accept the flows, serve each in a thread, and close everything when the time is over."""
    now = time.monotonic()
    end_at = now + min(order.seconds_max, SECONDS_MAX) + CONNECT_S
    threads: list[threading.Thread] = []
    with listener, contextlib.suppress(OSError):
        for _ in range(order.flows + STRANGERS_MAX):
            listener.settimeout(max(now + CONNECT_S - time.monotonic(), 0.001))
            connection, _peer = listener.accept()
            if not _knows(connection, secret):
                connection.close()
                continue
            thread = threading.Thread(
                target=_serve_flow, args=(connection, order.bytes_max, end_at), daemon=True
            )
            thread.start()
            threads.append(thread)
            if len(threads) == order.flows:
                break
    for thread in threads:
        thread.join()


def _knows(connection: socket.socket, secret: bytes) -> bool:
    try:
        shown = receive_exactly(connection, SECRET_BYTES, time.monotonic() + 1.0)
    except LinkBroken:
        return False
    return hmac.compare_digest(shown, secret)


def _serve_flow(connection: socket.socket, bytes_left: int, end_at: float) -> None:
    """Receive transfers until the sender closes the connection, or breaks a limit."""
    with connection, contextlib.suppress(LinkBroken):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(begun := receive_exactly(connection, HEADER_BYTES, end_at)) == HEADER_BYTES:
            size, both_ways = read_header(begun)
            bytes_left -= size * (2 if both_ways else 1)
            if bytes_left < 0:
                return
            connection.setblocking(False)
            back = size if both_ways else 0
            exchange([connection], send=back, receive=size, end_at=end_at)
            send_all(connection, RECEIPT, end_at)
