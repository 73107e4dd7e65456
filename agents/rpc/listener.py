"""Listens on a TCP port for an aiohttp application; refuses addresses that connect too often."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import time
from dataclasses import dataclass, field

import structlog
from aiohttp import web

from agents.daemon.tasks import Tasks
from agents.rpc.strangers import EvictableConnection, StrangerLimits, charged_address
from agents.rpc.tls import HANDSHAKE, Tls, explain

log = structlog.get_logger("tls")

ACCEPTED_AT_ONCE = 64
"""Connections accepted per turn of the event loop; the others wait in the kernel."""
QUEUED_MAX = 4_096
SILENT_S = 30.0
"""Seconds after which a connection without a complete request is closed. aiohttp's clients keep an
unused one for 15 s."""
HANDSHAKE_S = 5.0
HANDSHAKES_MAX = 1_024
"""Concurrent handshakes; for a further one another ends."""
QUIET_S = 10.0
"""How long the same failure of the same address is not logged again."""
MINUTE_S = 60.0
LINES_MAX = 30
"""Log lines a minute about failures of all addresses."""
PAUSE_S = 0.2
"""Pause after descriptors or memory ran out."""
EVICTED = 64
_ABORT = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Refusals:
    """Logs failed handshakes: the same one of an address once in ``QUIET_S``, and few in all."""

    _quiet_until: dict[tuple[str, str], float] = field(default_factory=dict)
    _minute: float = -math.inf
    _lines: int = 0
    _silent: int = 0
    """Failures that were not logged since the last line."""

    def note(self, peer: object, why: str) -> None:
        now, key = time.monotonic(), (charged_address(peer), why)
        if now - self._minute >= MINUTE_S:
            self._minute, self._lines = now, 0
            self._quiet_until = {k: end for k, end in self._quiet_until.items() if now < end}
        if now < self._quiet_until.get(key, 0.0) or self._lines >= LINES_MAX:
            self._silent += 1
            return
        self._lines += 1
        self._quiet_until[key] = now + QUIET_S
        host = str(peer[0]) if isinstance(peer, tuple) and peer else "?"
        log.warning("TLS handshake failed", peer=host, error=why, others=self._silent)
        self._silent = 0


@dataclass(eq=False)
class _Handshakes:
    """Handshakes under way. If there are too many, the oldest of the address with the most ends."""

    strangers: StrangerLimits
    _of: dict[str, dict[asyncio.Task[None], None]] = field(default_factory=dict)
    _count: int = 0

    def begin(self, place: str, task: asyncio.Task[None]) -> None:
        if self._count >= HANDSHAKES_MAX:
            most = max(self._of, key=lambda each: len(self._of[each]))
            oldest = next(iter(self._of[most]))
            self.strangers.refuse(most, "crowd")
            self.end(most, oldest)
            oldest.cancel()
        self._of.setdefault(place, {})[task] = None
        self._count += 1

    def end(self, place: str, task: asyncio.Task[None]) -> None:
        of_place = self._of.get(place, {})
        if task in of_place:
            del of_place[task]
            self._count -= 1
            if not of_place:
                del self._of[place]


@dataclass(eq=False)
class Listener:
    """One port."""

    runner: web.AppRunner
    strangers: StrangerLimits
    tls: Tls | None = None
    port: int = 0
    silent_s: float = SILENT_S
    _listening: socket.socket = field(init=False)
    _tasks: Tasks = field(default_factory=Tasks)
    _handshakes: _Handshakes = field(init=False)
    _refusals: _Refusals = field(default_factory=_Refusals)

    def __post_init__(self) -> None:
        self._handshakes = _Handshakes(self.strangers)

    async def start(self, host: str, port: int) -> None:
        """Listen; raises ``OSError``."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=QUEUED_MAX)
        self._listening.setblocking(False)
        self.port = int(self._listening.getsockname()[1])
        self._listen()

    async def close(self) -> None:
        """Accept no more; the runner closes the connections."""
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        self._tasks.cancel()

    def _listen(self) -> None:
        if self._listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                wire, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError:  # No descriptors, no memory.
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listening)
                loop.call_later(PAUSE_S, self._listen)
                self.strangers.evict(EVICTED)
                return
            if self.strangers.admits(charged_address(peer)):
                wire.setblocking(False)
                self._tasks.start(self._connect(wire, peer))
            else:
                # Without this the kernel would remember a closed connection for a minute.
                with contextlib.suppress(OSError):
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                wire.close()

    async def _connect(self, wire: socket.socket, peer: object) -> None:
        server = self.runner.server
        assert server is not None, "the runner is set up"
        context, place, task = None, charged_address(peer), asyncio.current_task()
        assert task is not None
        if self.tls is not None:
            context = self.tls.server
            self._handshakes.begin(place, task)
        HANDSHAKE.set(wire)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: EvictableConnection(server, self.strangers, self.silent_s),
                wire,
                ssl=context,
                ssl_handshake_timeout=None if context is None else HANDSHAKE_S,
            )
        except (OSError, TimeoutError) as error:
            # The client disconnected, or failed the handshake.
            if context is not None:
                self._refusals.note(peer, explain(error))
            wire.close()
        except asyncio.CancelledError:
            # asyncio closes the socket, which it still watches if the handshake has just succeeded.
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            self._handshakes.end(place, task)
