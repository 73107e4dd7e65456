"""Listens on a TCP port for an aiohttp application, and sends strangers away who ask too much."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass, field

import structlog
from aiohttp import web

from agents.daemon.tasks import Tasks
from agents.rpc.strangers import EvictableConnection, Strangers, place_of
from agents.rpc.tls import HANDSHAKE, Tls, explain

log = structlog.get_logger("tls")

ACCEPTED_AT_ONCE = 64
"""Connections accepted per turn of the event loop; the others wait in the kernel."""
QUEUED_MAX = 4_096
SILENT_S = 30.0
"""A connection without a complete request for so long is closed. aiohttp's clients keep an unused
one for 15 s."""
HANDSHAKE_S = 5.0
HANDSHAKES_MAX = 1_024
"""At once; a further connection is closed."""
QUIET_S = 10.0
"""How long the same failure of the same host is not logged again."""
HOSTS_MAX = 1_024
PAUSE_S = 0.2
"""After the process ran out of descriptors."""
EVICTED = 64
_ABORT = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Refusals:
    """Logs failed handshakes, the same one of a host once in ``QUIET_S``."""

    _said: dict[tuple[str, str], float] = field(default_factory=dict)

    def note(self, host: str, why: str) -> None:
        now = time.monotonic()
        if now < self._said.get((host, why), 0.0):
            return
        if len(self._said) >= HOSTS_MAX:
            if now < self._said.get(("", ""), 0.0):
                return
            self._said.clear()
            self._said["", ""] = now + QUIET_S
        self._said[host, why] = now + QUIET_S
        log.warning("TLS handshake failed", peer=host, error=why)


@dataclass(eq=False)
class Listener:
    """One port."""

    runner: web.AppRunner
    strangers: Strangers
    tls: Tls | None = None
    port: int = 0
    silent_s: float = SILENT_S
    _listening: socket.socket = field(init=False)
    _tasks: Tasks = field(default_factory=Tasks)
    _handshakes: int = 0
    _refusals: _Refusals = field(default_factory=_Refusals)

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
            if self.strangers.admits(place_of(peer)):
                wire.setblocking(False)
                self._tasks.start(self._connect(wire))
            else:
                # Without this the kernel would remember a closed connection for a minute.
                with contextlib.suppress(OSError):
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                wire.close()

    async def _connect(self, wire: socket.socket) -> None:
        server = self.runner.server
        assert server is not None, "the runner is set up"
        if self.tls is None:
            context = None
        elif self._handshakes < HANDSHAKES_MAX:
            context = self.tls.server
        else:
            wire.close()
            return
        self._handshakes += 1
        HANDSHAKE.set(wire)
        peer = "?"
        try:
            peer = str(wire.getpeername()[0])
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: EvictableConnection(server, self.strangers, self.silent_s),
                wire,
                ssl=context,
                ssl_handshake_timeout=None if context is None else HANDSHAKE_S,
            )
        except (
            OSError,
            TimeoutError,
        ) as error:  # The client disconnected, or failed the handshake.
            if context is not None:
                self._refusals.note(peer, explain(error))
            wire.close()
        finally:
            self._handshakes -= 1
