"""Listens on a TCP port for an aiohttp application, and sends strangers away who ask too much."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from dataclasses import dataclass, field

from aiohttp import web

from agents.daemon.tasks import Tasks
from agents.rpc.strangers import Connection, Strangers, place_of

ACCEPTED_AT_ONCE = 64
"""Connections accepted per turn of the event loop; the others wait in the kernel."""
QUEUED_MAX = 4_096
SILENT_S = 30.0
"""A connection without a complete request for so long is closed. aiohttp's clients keep an unused
one for 15 s."""
HANDSHAKE_S = 5.0
PAUSE_S = 0.2
"""After the process ran out of descriptors."""
EVICTED = 64
_ABORT = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Listener:
    """One port."""

    runner: web.AppRunner
    strangers: Strangers
    tls: ssl.SSLContext | None = None
    port: int = 0
    silent_s: float = SILENT_S
    _listening: socket.socket = field(init=False)
    _tasks: Tasks = field(default_factory=Tasks)

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
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(server, self.strangers, self.silent_s),
                wire,
                ssl=self.tls,
                ssl_handshake_timeout=None if self.tls is None else HANDSHAKE_S,
            )
        except (OSError, TimeoutError):  # It has gone, or failed the handshake.
            wire.close()
