"""Limits what senders who have not authenticated themselves may cost, by address.

A new connection is a stranger's until a request on it is authenticated. Each connection and each
unauthenticated request takes a token from its address's bucket, which fills slowly; the first
authenticated request of a connection returns the connection's token. An address without tokens is
sent away as soon as it connects. If too many strangers are connected, the oldest of the address
with the most makes room.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal, get_args

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError

log = structlog.get_logger("sailor.strangers")

RefusalCause = Literal["certificate", "crowd", "flood", "malformed", "signature", "token", "user"]
BURST = 2_000.0
PER_S = 200.0
"""Tokens of an address: ``BURST`` at first and at most, and ``PER_S`` more a second."""
ADDRESSES_MAX = 10_000
CONNECTIONS_MAX = 2_048
"""Connections on which nothing was authenticated yet."""
RECENT_MAX = 1_000
"""Most refusals whose times are remembered."""
LOG_S = 60.0
"""Seconds between two log lines about refusals."""


@dataclass(eq=False)
class Budget:
    """A token bucket for one address: fills by ``per_s`` a second, up to ``burst``."""

    per_s: float
    burst: float
    left: float = field(init=False)
    at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.left = self.burst

    def take(self) -> bool:
        """Take one; ``False`` if there is none."""
        now = time.monotonic()
        self.left = min(self.burst, self.left + (now - self.at) * self.per_s)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass(eq=False)
class Budgets:
    """A budget for each sender; remembers a limited number of senders."""

    per_s: float
    burst: float
    by_sender: dict[str, Budget] = field(default_factory=dict)

    def of(self, sender: str) -> Budget:
        """Return the sender's budget; a sender that is not in the table has a full one."""
        found = self.by_sender.get(sender)
        if found is None:
            while len(self.by_sender) >= ADDRESSES_MAX:
                del self.by_sender[next(iter(self.by_sender))]
            found = self.by_sender[sender] = Budget(self.per_s, self.burst)
        return found


class EvictableConnection(web.RequestHandler):
    """An aiohttp connection; a stranger's is closed if there are too many of them."""

    __slots__ = ("address", "is_known", "is_paid", "strangers")

    def __init__(self, server: web.Server, strangers: StrangerLimits, silent_s: float) -> None:
        """Close the connection if nothing complete arrives for ``silent_s``."""
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type] # what AppRunner passes on, too
            keepalive_timeout=silent_s,
        )
        self.strangers = strangers
        self.address, self.is_known, self.is_paid = "", False, True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection among the strangers'."""
        super().connection_made(transport)
        self.address = charged_address(transport.get_extra_info("peername"))
        self.strangers.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        self.strangers.discard(self)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Count what is no HTTP; log other failures."""
        if isinstance(kw.get("exc_info"), HttpProcessingError):
            self.strangers.refuse(self.address, "malformed")
        else:
            super().log_exception(*args, **kw)


@dataclass(eq=False)
class StrangerLimits:
    """Limits for connections and requests that are not authenticated."""

    budgets: Budgets = field(default_factory=lambda: Budgets(PER_S, BURST))
    refused: Counter[RefusalCause] = field(default_factory=Counter)
    """How many requests and connections were refused, by cause."""
    last: tuple[float, str, str] | None = None
    """Time, address and cause of the last refusal."""
    _moments: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))
    _connected: dict[str, dict[EvictableConnection, None]] = field(default_factory=dict)
    _count: int = 0
    _logged_s: float = -LOG_S
    _logged: int = 0

    def admits(self, address: str) -> bool:
        """Return whether an address may connect, which costs it a token."""
        if self.budgets.of(address).take():
            return True
        self.refuse(address, "flood")
        return False

    def add(self, connection: EvictableConnection) -> None:
        """Add a connection; evict another if there are too many."""
        if self._count >= CONNECTIONS_MAX:
            self.evict(1)
        self._connected.setdefault(connection.address, {})[connection] = None
        self._count += 1

    def evict(self, count: int) -> None:
        """Close the oldest strangers' connections of the addresses with the most."""
        for _ in range(min(count, self._count)):
            most = max(self._connected.values(), key=len)
            oldest = next(iter(most))
            self.refuse(oldest.address, "crowd")
            self.discard(oldest)
            if oldest.transport is not None:
                oldest.transport.abort()

    def discard(self, connection: EvictableConnection) -> None:
        """Forget a connection: it is closed, or was authenticated."""
        of_address = self._connected.get(connection.address, {})
        if connection in of_address:
            del of_address[connection]
            self._count -= 1
            if not of_address:
                del self._connected[connection.address]

    def by_cause(self) -> Mapping[str, int]:
        """Return the refusals by cause, zeros included, so that Prometheus sees the first ones."""
        return {cause: self.refused[cause] for cause in get_args(RefusalCause)}

    def count_within(self, seconds: float) -> int:
        """Return how many were refused within this time, up to ``RECENT_MAX``."""
        since = time.monotonic() - seconds
        return sum(moment >= since for moment in self._moments)

    def refuse(self, address: str, why: RefusalCause) -> None:
        """Count a refusal; log at most one line every ``LOG_S``."""
        self.refused[why] += 1
        self.last = time.time(), address, why
        self._moments.append(time.monotonic())
        now, total = time.monotonic(), self.refused.total()
        if now - self._logged_s >= LOG_S:
            log.warning("senders are refused", address=address, why=why,
                        refused=total - self._logged, cause="Refused")  # fmt: skip
            self._logged_s, self._logged = now, total


def charged_address(peer: object) -> str:
    """Return the address that is charged: of IPv6 the /64 network, which one sender may have."""
    text = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    if ":" not in text:
        return text
    try:
        return ip_address(text.partition("%")[0]).packed[:8].hex(":", 2)
    except ValueError:
        return text


AUTHENTICATED = web.RequestKey("authenticated", bool)


def note_authenticated(request: web.Request) -> None:
    """Note that the sender of a request is authenticated."""
    request[AUTHENTICATED] = True
    connection = request.protocol
    if isinstance(connection, EvictableConnection) and not connection.is_known:
        connection.is_known = True
        connection.strangers.discard(connection)
        connection.strangers.budgets.of(connection.address).left += 1


def charge(request: web.Request, why: RefusalCause | Literal[""]) -> bool:
    """Charge the sender of an unauthenticated request; ``False`` if it has no token left.

    The first request of a connection was paid for with it.
    """
    connection = request.protocol
    if not isinstance(connection, EvictableConnection):
        return True
    strangers = connection.strangers
    if why:
        strangers.refuse(connection.address, why)
    if connection.is_paid:
        connection.is_paid = False
        return True
    return strangers.budgets.of(connection.address).take()
