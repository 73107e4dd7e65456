"""Who calls: the name and the role behind a token, or behind a process on this host."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
import time
from dataclasses import dataclass
from functools import lru_cache

from aiohttp import web

from sailord.config import Config
from sailord.tokens import Role, TokenFile

CALLER = "sailor-caller"
GROUPS_S = 10.0
"""A user's groups are looked up again this often, so that leaving one needs no restart."""
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    name: str
    role: Role


def caller_with(tokens: TokenFile, header: str) -> Caller | None:
    """The caller that an ``Authorization`` header proves."""
    kind, _, shown = header.partition(" ")
    found = tokens.find(shown.encode("utf-8", "replace")) if kind == "Bearer" else None
    return None if found is None else Caller(found.name, found.role)


def caller_at(request: web.Request, config: Config) -> Caller | None:
    """The caller on the Unix socket, whom the kernel names."""
    wire = None if request.transport is None else request.transport.get_extra_info("socket")
    if wire is None:
        return None
    raw = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(raw)
    name, groups = _about(uid, gid, int(time.monotonic() / GROUPS_S))
    if uid in (0, os.getuid()):
        return Caller(name, "admin")
    if config.operators is not None and config.operators in groups:
        return Caller(name, "operator")
    if config.viewers is not None and config.viewers in groups:
        return Caller(name, "viewer")
    return None


@lru_cache(maxsize=256)
def _about(uid: int, gid: int, period: int) -> tuple[str, frozenset[str]]:
    """Return the user's name and groups; they are looked up again in each period."""
    del period
    try:
        name = pwd.getpwuid(uid).pw_name
        ids = os.getgrouplist(name, gid)
    except KeyError:
        return f"uid {uid}", frozenset()
    return name, frozenset(each.gr_name for each in grp.getgrall() if each.gr_gid in ids)


STILL_ADMITTED = "sailor-still-admitted"
"""A function that says whether the request would still be admitted now, for streams."""


def name_of(request: web.Request) -> str:
    """The caller's name; empty where no authentication is required."""
    caller = caller_of(request)
    return "" if caller is None else caller.name


def caller_of(request: web.Request) -> Caller | None:
    """The sender of the request; ``None`` where no authentication is required."""
    found = request.get(CALLER)
    return found if isinstance(found, Caller) else None
