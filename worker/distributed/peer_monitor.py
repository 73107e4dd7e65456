"""Hears at once when a peer goes: every two ranks keep a connection that says only this.

The kernel closes a process's connections however it dies, and a peer that is merely blocked in a
collective with others would not see it there. So each rank has one thread that listens to one
quiet connection for each peer. What it hears first it passes on before it closes its own, so that
everybody names the same culprit.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

from worker.distributed.interface import AbortedError, PeerLostError, TransportError, VoteRecord

_NAME = "watch"
_LOOK_S = 0.002
"""How often a rank looks whether the others have come."""


class PeerMonitor:
    """One rank's quiet connections to all others."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str,
        deadline_s: float,
        on_failure: Callable[[], None],
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> None:
        self.failure: TransportError | None = None
        self.failed = threading.Event()
        self.news: VoteRecord | None = None
        """What the peers are told with the failure."""
        self._told: VoteRecord | None = None
        self._heard_news: dict[int, VoteRecord] = {}
        self._spoken: set[int] = set()
        self._heard_all = threading.Event()
        self._rank = rank
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._peers = _connect(
            store, rank, size, host=host, deadline_s=deadline_s, check_cancelled=check_cancelled
        )
        self._waking, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="peer watch")
        self._thread.start()

    def fail(self, failure: TransportError) -> None:
        """Note why all is over, unless that is known; tell the peers; end what waits here."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            self._told = self.news
        news: dict[str, Any] = {} if self._told is None else {"news": self._told}
        match failure:
            case PeerLostError():
                self._tell({"lost": failure.rank, "doing": failure.doing, **news})
            case AbortedError():
                rank = self._rank if failure.rank is None else failure.rank
                self._tell({"aborted": failure.reason, "rank": rank, **news})
            case _:
                self._tell({"aborted": str(failure), "rank": self._rank, **news})
        self.failed.set()
        self._on_failure()

    def last_votes(self, wait_s: float) -> list[VoteRecord]:
        """What this rank has told with the failure, and what the others have that live."""
        assert self.failure is not None, "news are told when all is over"
        self._heard_all.wait(wait_s)
        with self._lock:
            return [*([self._told] if self._told else []), *self._heard_news.values()]

    def close(self) -> None:
        """Take leave of the peers, who then do not miss this rank."""
        self._tell({"bye": self._rank})
        self._waking.close()
        self._thread.join()
        for peer in self._peers.values():
            peer.close()
        self._woken.close()

    def _tell(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for peer in self._peers.values():
            try:
                peer.sendall(line)
            except OSError:
                continue  # It has gone, and needs no telling.

    def _listen(self) -> None:
        unread = dict.fromkeys(self._peers, b"")
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            selector.register(self._woken, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    rank = key.data
                    content = _read(self._peers[rank])
                    *lines, unread[rank] = (unread[rank] + content).split(b"\n")
                    farewells = [self._heard(rank, json.loads(line)) for line in lines]
                    has_left = any(farewells)
                    if lines or not content:
                        self._note_spoken(rank)
                    if has_left or not content:
                        selector.unregister(self._peers[rank])
                    if not content and not has_left:
                        self.fail(PeerLostError(rank, "watching it"))

    def _note_spoken(self, rank: int) -> None:
        self._spoken.add(rank)
        if self._spoken >= self._peers.keys():
            self._heard_all.set()

    def _heard(self, peer: int, message: dict[str, Any]) -> bool:
        """Take in what a peer says; is it a farewell?"""
        if "news" in message:
            step, slots = message["news"]
            with self._lock:
                self._heard_news[peer] = (int(step), slots)
        match message:
            case {"lost": int(rank), "doing": str(doing)}:
                self.fail(PeerLostError(rank, doing))
            case {"aborted": str(reason), "rank": int(rank)}:
                self.fail(AbortedError(reason, rank=rank))
            case {"bye": int()}:
                return True
            case _:
                raise AssertionError(f"a peer said {message}")
        return False


def _read(peer: socket.socket) -> bytes:
    try:
        return peer.recv(2**16)
    except OSError:
        return b""


def _connect(
    store: Store,
    rank: int,
    size: int,
    *,
    host: str,
    deadline_s: float,
    check_cancelled: Callable[[], None],
) -> dict[int, socket.socket]:
    """Connect each two ranks: the higher calls, the lower listens."""
    deadline = time.monotonic() + deadline_s
    peers: dict[int, socket.socket] = {}
    try:
        with socket.create_server((host, 0), backlog=size) as server:
            store.set(f"{_NAME}/{rank}", json.dumps(server.getsockname()[:2]))
            for lower in range(rank):
                address = _found(store, f"{_NAME}/{lower}", deadline, check_cancelled)
                peer = socket.create_connection(tuple(address), timeout=_left(deadline))
                peers[lower] = peer
                peer.sendall(rank.to_bytes(4, "little"))
            server.settimeout(_LOOK_S)
            while len(peers) < size - 1:
                check_cancelled()
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    _left(deadline)
                    continue
                peer.settimeout(_left(deadline))
                peers[int.from_bytes(_exactly(peer, 4), "little")] = peer
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    for peer in peers.values():
        peer.settimeout(1.0)  # Lines are short: a peer that takes none of them is stuck.
    return peers


def _found(store: Store, name: str, deadline: float, check_cancelled: Callable[[], None]) -> Any:
    """Wait for what another rank says of itself; torch's own wait could not be given up."""
    while not store.check([name]):
        check_cancelled()
        _left(deadline)
        time.sleep(_LOOK_S)
    return json.loads(store.get(name))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("some ranks did not come")
    return left


def _exactly(peer: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        more = peer.recv(count - len(content))
        if not more:
            raise ConnectionError("a peer went before it said who it is")
        content += more
    return content
