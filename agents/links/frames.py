"""The bytes on a measurement's connection: the secret, then a header before each transfer.

The sender writes a header and then ``size`` bytes. If the transfer goes both ways, the receiver
writes as many. Then the receiver writes a receipt of one byte.
"""

from __future__ import annotations

import socket
import struct
import time

from agents.links.exchange import LinkBroken

SECRET_BYTES = 32
_HEADER = struct.Struct("!?Q")
HEADER_BYTES = _HEADER.size
RECEIPT = b"."


def header(size: int, *, both_ways: bool) -> bytes:
    """Return the header of a transfer."""
    return _HEADER.pack(both_ways, size)


def read_header(data: bytes) -> tuple[int, bool]:
    """Return the size of a transfer, and whether it goes both ways."""
    both_ways, size = _HEADER.unpack(data)
    return size, both_ways


def receive_exactly(connection: socket.socket, count: int, end_at: float) -> bytes:
    """Receive ``count`` bytes; fewer (or none) if the peer closes the connection."""
    data = b""
    while len(data) < count:
        wait_s = end_at - time.monotonic()
        if wait_s <= 0:
            raise LinkBroken("nothing came in time")
        connection.settimeout(wait_s)
        try:
            read = connection.recv(count - len(data))
        except OSError as error:
            raise LinkBroken(f"the connection failed: {error}") from None
        if not read:
            break
        data += read
    return data


def send_all(connection: socket.socket, data: bytes, end_at: float) -> None:
    """Send a few bytes."""
    connection.settimeout(max(end_at - time.monotonic(), 0.001))
    try:
        connection.sendall(data)
    except OSError as error:
        raise LinkBroken(f"the connection failed: {error}") from None
