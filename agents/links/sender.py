"""The sending end of a measurement."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass, field

from agents.links.exchange import LinkBroken, exchange
from agents.links.frames import HEADER_BYTES, header, send_all
from agents.links.receiver import CONNECT_S, FLOWS_MAX, SECONDS_MAX
from agents.links.traffic import busy
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.link_records import LinkOrder, LinkTimes, Listening, ListenOrder, SizeTimes
from agents.rpc.client import CallFailed, SignedClient, agent_of

ROUND_TRIPS = 9
REPEATS = 5
REPEATS_LARGE = 3
LARGE_S = 0.2
"""Transfers that take longer than this are repeated less often."""


@dataclass(eq=False)
class Sender:
    """Measures the way to a peer, one measurement at a time."""

    client: SignedClient
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def measure(self, order: LinkOrder) -> LinkTimes:
        """Carry out an order of sailord."""
        if self._busy.locked():
            return LinkTimes(busy="takes part in another measurement")
        async with self._busy:
            why = await busy(order.quiet_bytes_per_s, order.look_s)
            if why:
                return LinkTimes(busy=why)
            wanted = ListenOrder(
                order.flows,
                order.bytes_max,
                order.seconds_max,
                order.quiet_bytes_per_s,
                order.look_s,
            )
            try:
                status, body = await self.client.call(
                    order.peer,
                    "POST",
                    "/v1/links/listen",
                    encode(wanted),
                    to=agent_of(order.name) if order.name else "agent",
                    timeout_s=order.look_s + 2.0,
                )
                if status != 200:
                    return LinkTimes(broken=f"{order.peer} answered {status}")
                found = decode(Listening, body)
            except (CallFailed, WireError) as error:
                return LinkTimes(broken=f"the peer's agent does not answer: {error}")
            if found.busy:
                return LinkTimes(busy=f"the peer {found.busy}")
            return await asyncio.to_thread(measure, order, found)


def measure(order: LinkOrder, found: Listening) -> LinkTimes:
    """Connect to a peer that listens, and time transfers of growing size."""
    begun = time.monotonic()
    run = _Run(order, end_at=begun + min(order.seconds_max, SECONDS_MAX))
    host = order.peer.rpartition(":")[0].strip("[]")
    broken = ""
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(min(order.flows, FLOWS_MAX)):
                connection = socket.create_connection((host, found.port), timeout=CONNECT_S)
                run.connections.append(stack.enter_context(connection))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                send_all(connection, found.secret, run.end_at)
                connection.setblocking(False)
            run.find_round_trip()
            run.time_sizes()
        except OSError as error:
            broken = f"the peer cannot be connected to: {error}"
        except LinkBroken as error:
            broken = str(error)
    return LinkTimes(run.round_trip_s, tuple(run.times), run.bytes_moved, broken=broken)


@dataclass(eq=False)
class _Run:
    """One measurement as it goes on."""

    order: LinkOrder
    end_at: float
    connections: list[socket.socket] = field(default_factory=list)
    round_trip_s: float = 0.0
    times: list[SizeTimes] = field(default_factory=list)
    bytes_moved: int = 0

    def find_round_trip(self) -> None:
        """Send one byte several times, on the first connection."""
        found = [
            self._transfer(self.connections[:1], 1, both_ways=False) for _ in range(ROUND_TRIPS)
        ]
        self.round_trip_s = min(found)

    def time_sizes(self) -> None:
        """Time each size until the bytes or the seconds would not suffice for the next one."""
        before_s, before = self.round_trip_s, 1
        for size in self.order.sizes_bytes:
            ways = 2 if self.order.both_ways else 1
            each = size * self.order.flows * ways
            grows = size / before if before_s > 2 * self.round_trip_s else 1.0
            expected_s = before_s * grows
            repeats = REPEATS_LARGE if expected_s > LARGE_S else REPEATS
            needed_s, needed = expected_s * (repeats + 1), each * (repeats + 1)
            is_over = time.monotonic() + needed_s > self.end_at
            if is_over or self.bytes_moved + needed > self.order.bytes_max:
                return
            taken = []
            for _ in range(repeats + 1):  # The first opens TCP's window, and does not count.
                took_s = self._transfer(self.connections, size, both_ways=self.order.both_ways)
                taken.append(max(took_s - self.round_trip_s / 2, 1e-9))
                self.bytes_moved += each
            self.times.append(SizeTimes(size, tuple(taken[1:])))
            # Take the least: a busy host delays most small transfers, by what large ones hide.
            before_s, before = min(taken[1:]), size

    def _transfer(self, over: list[socket.socket], size: int, *, both_ways: bool) -> float:
        """Return the seconds until all receipts are here."""
        begun = time.perf_counter()
        for connection in over:
            if connection.send(header(size, both_ways=both_ways)) != HEADER_BYTES:
                raise LinkBroken("a header does not fit into the connection")
        exchange(over, send=size, receive=1 + (size if both_ways else 0), end_at=self.end_at)
        return time.perf_counter() - begun
