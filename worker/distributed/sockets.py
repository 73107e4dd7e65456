"""Listens at a node's address, of either version of IP."""

from __future__ import annotations

import socket


def listener_at(host: str, backlog: int) -> socket.socket:
    """Listen on a free port of an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)
