"""The only way from other machines to the ranks' store, which itself does not authenticate.

torch's ``TCPStore`` listens on the loopback device of rank 0. A *gate* there relays connections
that prove that they know the generation's secret. Each other rank has a *tunnel*: a port on its own
loopback device, whose connections it takes through the gate.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from worker.distributed.proof import GREETING_S, STRANGERS_MAX, prove, receive_proof
from worker.distributed.sockets import listener_at

PURPOSE = b"store"
LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
_READ_BYTES = 1 << 16
_WAITING_BYTES_MAX = 1 << 20
"""Bytes that wait for a slow receiver; with more, reading from its sender stops."""


def open_gate(host: str, secret: bytes, store: tuple[str, int], ranks: int) -> StoreRelay:
    """Listen on a port of ``host`` for ranks that know the secret."""

    def admit(caller: socket.socket) -> socket.socket:
        caller.settimeout(GREETING_S)
        receive_proof(caller, secret, PURPOSE, 0)
        return socket.create_connection(store, timeout=CONNECT_S)

    server = listener_at(host, backlog=ranks + STRANGERS_MAX)
    return StoreRelay(server, admit, ranks + STRANGERS_MAX, "store gate")


def open_tunnel(
    gate: tuple[str, int], secret: bytes, rank: int, first: socket.socket
) -> StoreRelay:
    """Listen on the loopback device for this process's store clients.

    ``first``, a connection to the store, is for the first of them.
    """
    unused = [first]

    def pass_on(_: socket.socket) -> socket.socket:
        return unused.pop() if unused else connect_gate(gate, secret, rank)

    return StoreRelay(socket.create_server((LOOPBACK, 0)), pass_on, STRANGERS_MAX, "store tunnel")


def connect_gate(gate: tuple[str, int], secret: bytes, rank: int) -> socket.socket:
    """Connect to the store through the gate."""
    peer = socket.create_connection(gate, timeout=CONNECT_S)
    try:
        peer.settimeout(GREETING_S)
        prove(peer, secret, PURPOSE, listener=0, caller=rank)
    except OSError:
        peer.close()
        raise
    return peer


@dataclass(eq=False)
class StoreRelay:
    """Accepts connections, and relays each to another one until either ends."""

    server: socket.socket
    connect: Callable[[socket.socket], socket.socket]
    """Opens the other end of an accepted connection; ``OSError`` refuses it."""
    waiting_max: int
    name: str
    _ends: dict[socket.socket, _End] = field(default_factory=dict)
    _new: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)
    _connecting: int = 0
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.server.setblocking(False)
        self._waking, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True, name=self.name)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server.getsockname()[1])

    def close(self) -> None:
        """End all connections."""
        self._is_over = True
        self._wake()
        self._thread.join()
        self._waking.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waking.send(b"!")

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.server, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._is_over:
                for key, events in selector.select():
                    if key.fileobj is self.server:
                        self._accept()
                    elif key.fileobj is self._woken:
                        self._woken.recv(64)
                        self._take_new(selector)
                    elif (end := self._ends.get(key.fileobj)) is not None:  # type: ignore[call-overload] # only sockets are registered
                        if not end.move(events):
                            self._drop(selector, end)
                            continue
                        for each in (end, end.other):
                            selector.modify(each.line, each.wanted())
            for line in self._ends:
                line.close()
        for line in (line for pair in self._new for line in pair):
            line.close()
        self.server.close()
        self._woken.close()

    def _accept(self) -> None:
        try:
            caller, _ = self.server.accept()
        except OSError:
            return
        with self._lock:
            is_crowded = self._connecting >= self.waiting_max
            self._connecting += not is_crowded
        if is_crowded:
            caller.close()
        else:
            threading.Thread(target=self._connect, args=(caller,), daemon=True).start()

    def _connect(self, caller: socket.socket) -> None:
        """Open the other end, in a thread, so that a silent caller does not delay others."""
        try:
            other = self.connect(caller)
        except OSError as error:
            print(f"{self.name}: a connection was refused: {error}", flush=True)
            caller.close()
        else:
            with self._lock:
                self._new.append((caller, other))
            self._wake()
        finally:
            with self._lock:
                self._connecting -= 1

    def _take_new(self, selector: selectors.BaseSelector) -> None:
        with self._lock:
            pairs, self._new = self._new, []
        for lines in pairs:
            one, two = (_End(line) for line in lines)
            one.other, two.other = two, one
            for end in (one, two):
                end.line.setblocking(False)
                end.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends[end.line] = end
                selector.register(end.line, selectors.EVENT_READ)

    def _drop(self, selector: selectors.BaseSelector, end: _End) -> None:
        for each in (end, end.other):
            selector.unregister(each.line)
            del self._ends[each.line]
            each.line.close()


@dataclass(eq=False)
class _End:
    """One of two connections, and the bytes to be sent on it."""

    line: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    other: _End = field(init=False)

    def wanted(self) -> int:
        """Return the events to wait for."""
        reads = len(self.other.waiting) < _WAITING_BYTES_MAX
        return reads * selectors.EVENT_READ | bool(self.waiting) * selectors.EVENT_WRITE

    def move(self, events: int) -> bool:
        """Move bytes; return False once the connection has ended."""
        try:
            if events & selectors.EVENT_READ:
                content = self.line.recv(_READ_BYTES)
                if not content:
                    return False
                self.other.waiting += content
                self.other.flush()
            if events & selectors.EVENT_WRITE:
                self.flush()
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def flush(self) -> None:
        """Send as much as is possible without waiting."""
        with contextlib.suppress(BlockingIOError):
            while self.waiting:
                del self.waiting[: self.line.send(self.waiting)]
