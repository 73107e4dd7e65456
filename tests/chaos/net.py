"""Proxies between nodes, sailord and the store: cut, slow, one-way and reset connections.

Each agent has its own proxy to the store; others reach it, and sailord, through a proxy, too. Both
ends of a connection are known: the opener is found by its socket. Cut data waits, as TCP would
retransmit it, and arrives once the cut is over. Connections between workers are not proxied.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sailord.local.paths import free_port
from tests.chaos.etcd_members import Members
from tests.chaos.sockets import owner_of

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
CHUNK_BYTES = 1 << 18
LOOK_S = 0.05
ABRUPTLY = struct.pack("ii", 1, 0)
"""A linger option with which closing a socket resets the connection."""
TIMEOUT_S = 2.0
"""Deadline of a call to an etcd that is slow or cut off: shorter than a lease."""
STORE, SAILORD = "store", "sailord"
"""Names of ends that are not nodes."""


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """The faults of one end's traffic, out and in."""

    receives: bool = True
    sends: bool = True
    delay_s: float = 0.0
    """Delay of every piece of at most 256 KiB."""


FAIR = LinkFaults()
CUT = LinkFaults(receives=False, sends=False)
DEAF = LinkFaults(receives=False)
MUTE = LinkFaults(sends=False)
SLOW = LinkFaults(delay_s=0.3)


@dataclass(eq=False)
class Net:
    """All proxies of one cluster, served by one thread until closed."""

    family: Callable[[], dict[int, str]] = dict
    """Returns the node of each process that opens connections."""
    faults_of: dict[str, LinkFaults] = field(default_factory=dict)
    """Faults by end; none where an end is not listed."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _open: set[tuple[str, str, asyncio.StreamWriter]] = field(default_factory=set)
    _servers: list[asyncio.Server] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- proxies --------------------------------------------------------------------------------

    def tcp(self, host_port: str, end: str, begin: str | None = None) -> str:
        """Open a proxy to a port and return its own; find the opener by its socket if not given."""
        host, _, port = host_port.rpartition(":")
        return self._listen(lambda: asyncio.open_connection(host, int(port)), end, begin, None)

    def unix(self, target: Path, path: Path, end: str, begin: str) -> str:
        """Open a proxy from one Unix socket to another."""
        return self._listen(lambda: asyncio.open_unix_connection(target), end, begin, path)

    def _listen(self, connect: Connect, end: str, begin: str | None, path: Path | None) -> str:
        async def serve() -> str:
            async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._carry(reader, writer, connect, end, begin)

            if path is not None:
                path.unlink(missing_ok=True)
                self._servers.append(await asyncio.start_unix_server(carry, path))
                return str(path)
            server = await asyncio.start_server(carry, "127.0.0.1", 0)
            self._servers.append(server)
            host, port = server.sockets[0].getsockname()
            return f"{host}:{port}"

        return asyncio.run_coroutine_threadsafe(serve(), self._loop).result()

    def reset(self, name: str) -> None:
        """Reset every connection of this end."""

        def abort() -> None:
            for one, other, writer in list(self._open):
                if name in (one, other):
                    line = writer.get_extra_info("socket")
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPTLY)
                    writer.transport.abort()

        self._loop.call_soon_threadsafe(abort)

    # ---- one connection -------------------------------------------------------------------------

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connect: Connect,
        end: str,
        begin: str | None,
    ) -> None:
        if begin is None:
            begin = owner_of(writer.get_extra_info("peername")[1], self.family()) or ""
        with contextlib.suppress(OSError):
            await self._wait(begin, end)
            far_reader, far_writer = await connect()
            with self._known(begin, end, writer), self._known(begin, end, far_writer):
                await asyncio.gather(
                    self._pump(reader, far_writer, begin, end),
                    self._pump(far_reader, writer, end, begin),
                )
        writer.transport.abort()

    @contextlib.contextmanager
    def _known(self, begin: str, end: str, writer: asyncio.StreamWriter) -> Iterator[None]:
        entry = begin, end, writer
        self._open.add(entry)
        try:
            yield
        finally:
            self._open.discard(entry)
            writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begin: str, end: str
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                await self._wait(begin, end)
                writer.write(chunk)
                await writer.drain()
        await self._wait(begin, end)  # A cut also delays the news that one end has closed.
        if writer.can_write_eof() and not writer.is_closing():
            with contextlib.suppress(OSError):
                writer.write_eof()

    async def _wait(self, begin: str, end: str) -> None:
        """Return when a piece may pass from one end to the other."""
        while not (self._at(begin).sends and self._at(end).receives):
            await asyncio.sleep(LOOK_S)
        if delay_s := max(self._at(begin).delay_s, self._at(end).delay_s):
            await asyncio.sleep(delay_s)

    def _at(self, name: str) -> LinkFaults:
        return self.faults_of.get(name, FAIR)


@dataclass(eq=False)
class Proxies:
    """Replaces the addresses in every configuration by those of proxies."""

    net: Net
    folder: Path
    """The cluster's folder."""
    has_etcd: bool = False
    """Whether the store is an etcd; else it is sailord's own."""
    members: Members | None = None

    def open(self) -> None:
        """Start the proxies, and the etcd if there is one."""
        self.net.start()
        if self.has_etcd:
            self.members = Members(self.folder)

    def close(self) -> None:
        """End it."""
        if self.members is not None:
            self.members.close()
        self.net.close()

    def of_sailord(self, text: str) -> str:
        """Put sailord's own address and its store's behind proxies."""
        port = re.search(r"^port = (\d+)$", text, re.MULTILINE)
        assert port is not None
        address = self.net.tcp(f"127.0.0.1:{port[1]}", SAILORD)
        text = text.replace(port[0], f'{port[0]}\naddress = "{address}"')
        return f'store = "{self._store(SAILORD)}"\n{text}' if self.has_etcd else text

    def of_agent(self, text: str, name: str) -> str:
        """Put an agent's address and its store's behind proxies."""
        own, port = f'"unix://{self.folder}/head/store.sock"', free_port()
        assert own in text
        assert "port = 0" in text
        address = self.net.tcp(f"127.0.0.1:{port}", name)
        text = text.replace("port = 0", f'port = {port}\naddress = "{address}"')
        return text.replace(own, f'"{self._store(name)}"')

    def _store(self, begin: str) -> str:
        if self.members is not None:
            ends = self.members.endpoints
            return etcd_address(self.net.tcp(each, STORE, begin) for each in ends)
        path = self.folder / f"{begin}.sock"
        return f"unix://{self.net.unix(self.folder / 'head/store.sock', path, STORE, begin)}"


def etcd_address(endpoints: Iterable[str]) -> str:
    """Return the store's address as a configuration names it."""
    return f"etcd://{','.join(endpoints)}?timeout_s={TIMEOUT_S}"
