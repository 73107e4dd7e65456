"""Sends and receives on several connections at once, as fast as they go."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

CHUNK = 1 << 20
_ZEROS = memoryview(bytes(CHUNK))


class LinkBroken(Exception):  # noqa: N818 - names the outcome of a transfer
    """A connection ended or stood still; the text says which."""


@dataclass(slots=True)
class _Flow:
    connection: socket.socket
    to_send: int
    to_receive: int


def exchange(
    connections: Sequence[socket.socket], *, send: int, receive: int, end_at: float
) -> None:
    """Send and receive these bytes on each connection; raise ``LinkBroken`` if one fails."""
    into = bytearray(CHUNK)
    flows = {c.fileno(): _Flow(c, send, receive) for c in connections}
    while True:
        readers = [number for number, flow in flows.items() if flow.to_receive]
        writers = [number for number, flow in flows.items() if flow.to_send]
        if not readers and not writers:
            return
        wait_s = end_at - time.monotonic()
        if wait_s <= 0:
            raise LinkBroken("it stood still, or was too slow for the time allowed")
        readable, writable, _ = select.select(readers, writers, [], wait_s)
        try:
            for number in readable:
                flow = flows[number]
                count = flow.connection.recv_into(into, min(flow.to_receive, CHUNK))
                if count == 0:
                    raise LinkBroken("the peer closed the connection")
                flow.to_receive -= count
            for number in writable:
                flow = flows[number]
                flow.to_send -= flow.connection.send(_ZEROS[: min(flow.to_send, CHUNK)])
        except BlockingIOError:
            continue
        except OSError as error:
            raise LinkBroken(f"the connection failed: {error.strerror}") from None
