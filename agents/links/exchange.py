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

    @property
    def events(self) -> int:
        """What it waits for."""
        return bool(self.to_receive) * select.POLLIN | bool(self.to_send) * select.POLLOUT


def exchange(
    connections: Sequence[socket.socket], *, send: int, receive: int, end_at: float
) -> None:
    """Send and receive these bytes on each connection; raise ``LinkBroken`` if one fails."""
    into = bytearray(CHUNK)
    flows = {c.fileno(): _Flow(c, send, receive) for c in connections}
    while True:
        poll = select.poll()  # select() knows no number above 1023.
        flows = {number: flow for number, flow in flows.items() if flow.events}
        if not flows:
            return
        for number, flow in flows.items():
            poll.register(number, flow.events)
        wait_s = end_at - time.monotonic()
        if wait_s <= 0:
            raise LinkBroken("it stood still, or was too slow for the time allowed")
        try:
            for number, ready in poll.poll(wait_s * 1000):
                flow = flows[number]
                if flow.to_receive and ready & ~select.POLLOUT:
                    count = flow.connection.recv_into(into, min(flow.to_receive, CHUNK))
                    if count == 0:
                        raise LinkBroken("the peer closed the connection")
                    flow.to_receive -= count
                if flow.to_send and ready & ~select.POLLIN:
                    flow.to_send -= flow.connection.send(_ZEROS[: min(flow.to_send, CHUNK)])
        except BlockingIOError:
            continue
        except OSError as error:
            raise LinkBroken(f"the connection failed: {error.strerror}") from None
