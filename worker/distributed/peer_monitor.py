"""Detects the death of a peer at once, over one idle connection for each pair of ranks.

The kernel closes a process's connections however it dies, but a peer that is blocked in a
collective with other ranks would not notice. So each rank has one thread that watches an idle
connection to each peer. It forwards the first failure that it learns of before it closes its own
connections, so that all ranks name the same cause.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

from worker.distributed.interface import AbortedError, PeerLostError, TransportError, VoteRecord

_PREFIX = "watch"
_POLL_S = 0.002
"""Seconds between two checks whether the other ranks have connected."""


class PeerMonitor:
    """One rank's idle connections to all peers."""

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
        self.vote: VoteRecord | None = None
        """The vote that is sent to the peers with a failure."""
        self._sent_vote: VoteRecord | None = None
        self._peer_votes: dict[int, VoteRecord] = {}
        self._heard_from: set[int] = set()
        self._all_heard = threading.Event()
        self._rank = rank
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._peers = _connect(
            store, rank, size, host=host, deadline_s=deadline_s, check_cancelled=check_cancelled
        )
        self._waking, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True, name="peer monitor")
        self._thread.start()

    def fail(self, failure: TransportError) -> None:
        """Record the first failure, send it to the peers and end all waits."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            self._sent_vote = self.vote
        vote: dict[str, Any] = {} if self._sent_vote is None else {"news": self._sent_vote}
        match failure:
            case PeerLostError():
                self._send_to_peers({"lost": failure.rank, "doing": failure.doing, **vote})
            case AbortedError():
                rank = self._rank if failure.rank is None else failure.rank
                self._send_to_peers({"aborted": failure.reason, "rank": rank, **vote})
            case _:
                self._send_to_peers({"aborted": str(failure), "rank": self._rank, **vote})
        self.failed.set()
        self._on_failure()

    def last_votes(self, wait_s: float) -> list[VoteRecord]:
        """Return the votes that this rank and the surviving peers sent with the failure."""
        assert self.failure is not None, "votes are exchanged after a failure only"
        self._all_heard.wait(wait_s)
        with self._lock:
            return [*([self._sent_vote] if self._sent_vote else []), *self._peer_votes.values()]

    def close(self) -> None:
        """Say goodbye to the peers, so that they do not report this rank as lost."""
        self._send_to_peers({"bye": self._rank})
        self._waking.close()
        self._thread.join()
        for peer in self._peers.values():
            peer.close()
        self._woken.close()

    def _send_to_peers(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # The peer is gone.
                peer.sendall(line)

    def _run(self) -> None:
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
                    content = b""
                    with contextlib.suppress(OSError):
                        content = self._peers[rank].recv(2**16)
                    *lines, unread[rank] = (unread[rank] + content).split(b"\n")
                    goodbyes = [self._handle(rank, json.loads(line)) for line in lines]
                    said_goodbye = any(goodbyes)
                    if lines or not content:
                        self._heard_from.add(rank)
                        if self._heard_from >= self._peers.keys():
                            self._all_heard.set()
                    if said_goodbye or not content:
                        selector.unregister(self._peers[rank])
                    if not content and not said_goodbye:
                        self.fail(PeerLostError(rank, "the peer monitor"))

    def _handle(self, peer: int, message: dict[str, Any]) -> bool:
        """Handle a peer's message; return True if it is a goodbye."""
        if "news" in message:
            step, slots = message["news"]
            with self._lock:
                self._peer_votes[peer] = (int(step), slots)
        match message:
            case {"lost": int(rank), "doing": str(doing)}:
                self.fail(PeerLostError(rank, doing))
            case {"aborted": str(reason), "rank": int(rank)}:
                self.fail(AbortedError(reason, rank=rank))
            case {"bye": int()}:
                return True
            case _:
                raise AssertionError(f"unknown message from a peer: {message}")
        return False


def _connect(
    store: Store,
    rank: int,
    size: int,
    *,
    host: str,
    deadline_s: float,
    check_cancelled: Callable[[], None],
) -> dict[int, socket.socket]:
    """Connect every pair of ranks: the higher rank connects, the lower one listens."""
    deadline = time.monotonic() + deadline_s
    peers: dict[int, socket.socket] = {}
    try:
        with socket.create_server((host, 0), backlog=size) as server:
            store.set(f"{_PREFIX}/{rank}", json.dumps(server.getsockname()[:2]))
            for lower in range(rank):
                address = _wait_for_key(store, f"{_PREFIX}/{lower}", deadline, check_cancelled)
                peer = socket.create_connection(tuple(address), timeout=_remaining(deadline))
                peers[lower] = peer
                peer.sendall(rank.to_bytes(4, "little"))
            server.settimeout(_POLL_S)
            while len(peers) < size - 1:
                check_cancelled()
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    _remaining(deadline)
                    continue
                try:
                    peer.settimeout(_remaining(deadline))
                    peers[int.from_bytes(_receive_exactly(peer, 4), "little")] = peer
                except BaseException:
                    peer.close()
                    raise
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    for peer in peers.values():
        peer.settimeout(1.0)  # Messages are short: a peer that does not read them is stuck.
    return peers


def _wait_for_key(
    store: Store, name: str, deadline: float, check_cancelled: Callable[[], None]
) -> Any:
    """Poll for a value of another rank; torch's own wait cannot be cancelled."""
    while not store.check([name]):
        check_cancelled()
        _remaining(deadline)
        time.sleep(_POLL_S)
    return json.loads(store.get(name))


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("some ranks did not connect in time")
    return left


def _receive_exactly(peer: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        received = peer.recv(count - len(content))
        if not received:
            raise ConnectionError("a peer closed its connection before it sent its rank")
        content += received
    return content
