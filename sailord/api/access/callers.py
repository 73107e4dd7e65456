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
from urllib.parse import quote, unquote

from aiohttp import web

from agents.rpc.signing import (
    REQUEST_HEADER,
    ClusterKey,
    SignatureError,
    Verifier,
    sign_request,
)
from agents.rpc.tls import peer_of
from sailord.config import Config
from sailord.tokens import ROLES, AccessTokenFile, Role

CALLER = "sailor-caller"
PASSED_ON = "Sailor-Caller"
"""Header in which a standby names the caller of its Unix socket to the leader."""
GROUPS_S = 10.0
"""A user's groups are looked up again this often, so that leaving one needs no restart."""
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    name: str
    role: Role


def caller_with(tokens: AccessTokenFile, header: str) -> Caller | None:
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
    name, groups = _look_up(uid, gid, int(time.monotonic() / GROUPS_S))
    if uid in (0, os.getuid()):
        return Caller(name, "admin")
    if config.operators is not None and config.operators in groups:
        return Caller(name, "operator")
    if config.viewers is not None and config.viewers in groups:
        return Caller(name, "viewer")
    return None


def name_caller(
    caller: Caller, key: ClusterKey, leader: str, method: str, path: str
) -> dict[str, str]:
    """The headers in which a standby tells the leader who called it."""
    said = f"{caller.role} {quote(caller.name)}"
    header, _ = sign_request(key, leader, method, f"{path} {said}", b"", at=time.time())
    return {PASSED_ON: said, REQUEST_HEADER: header}


def caller_named(request: web.Request, verifier: Verifier) -> Caller | None:
    """The caller that a standby names: it shows its certificate, and signs with the cluster's key.

    The body is not signed: it comes over the TLS connection of that certificate.
    """
    said, peer = request.headers.get(PASSED_ON, ""), peer_of(request.transport)
    shown, _, name = said.partition(" ")
    role = next((each for each in ROLES if each == shown), None)
    if peer is None or peer.role != "sailord" or role is None:
        return None
    about, header = f"{request.raw_path} {said}", request.headers.get(REQUEST_HEADER)
    try:
        verifier.check_request(request.method, about, b"", header, at=time.time())
    except SignatureError:
        return None
    return Caller(unquote(name), role)


@lru_cache(maxsize=256)
def _look_up(uid: int, gid: int, period: int) -> tuple[str, frozenset[str]]:
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
