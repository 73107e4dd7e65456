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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from worker.distributed.interface import AbortedError, PeerLostError, TransportError, VoteRecord
from worker.distributed.presence import announce, are_all_there, pause_s
from worker.distributed.proof import GREETING_S, STRANGERS_MAX, prove, receive_proof
from worker.distributed.sockets import listener_at

_PREFIX = "watch"
KEEPALIVE_S, KEEPALIVES = 1, 4
"""A peer is lost if its machine's kernel does not answer for 5 s; it answers for a hung process,
too."""
_POLL_S = 0.002
"""Seconds between two checks whether the others have connected, or the listener was closed."""
CALLS_MAX = 32
"""The most ranks that are being connected to at a time."""


class PeerMonitor:
    """One rank's idle connections to all peers."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str,
        secret: bytes,
        deadline_s: float,
        on_failure: Callable[[TransportError], None],
        position: Callable[[], dict[str, Any]] = dict,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> None:
        self.failure: TransportError | None = None
        self.failed = threading.Event()
        self.vote: VoteRecord | None = None
        """The vote that is sent to the peers with a failure."""
        self._sent_vote: VoteRecord | None = None
        self._peer_votes: dict[int, VoteRecord] = {}
        self._last_heard_of: set[int] = set()
        self._all_heard = threading.Event()
        self._rank = rank
        self._on_failure = on_failure
        self._position = position
        self._answers: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._peers = _connect(
            store,
            rank,
            size,
            host=host,
            secret=secret,
            deadline_s=deadline_s,
            check_cancelled=check_cancelled,
        )
        # Several threads send, and a message may be sent in parts.
        self._sending = {peer: threading.Lock() for peer in self._peers}
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
        self._on_failure(failure)

    def last_votes(self, wait_s: float) -> list[VoteRecord]:
        """Return the votes that this rank and the surviving peers sent with the failure."""
        assert self.failure is not None, "votes are exchanged after a failure only"
        self._all_heard.wait(wait_s)
        with self._lock:
            return [*([self._sent_vote] if self._sent_vote else []), *self._peer_votes.values()]

    def ask_positions(self, wait_s: float) -> dict[int, dict[str, Any]]:
        """Ask all peers for their positions; return the answers that come in time.

        The threads that answer do nothing else, so one that is silent belongs to a process that is
        stopped, or to a machine that hangs.
        """
        self._answers = {}
        self._send_to_peers({"where": self._rank})
        deadline = time.monotonic() + wait_s
        while len(self._answers) < len(self._peers) and time.monotonic() < deadline:
            if self.failed.wait(_POLL_S):
                break
        return dict(self._answers)

    def close(self) -> None:
        """Say goodbye to the peers, so that they do not report this rank as lost."""
        self._send_to_peers({"bye": self._rank})
        self._waking.close()
        self._thread.join()
        for peer in self._peers.values():
            peer.close()
        self._woken.close()

    def _send_to_peers(self, message: dict[str, Any]) -> None:
        for rank in self._peers:
            self._send(rank, message)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._sending[rank], contextlib.suppress(OSError):  # The peer is gone.
            self._peers[rank].sendall(line)

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
                    if said_goodbye or not content:
                        self._expect_no_vote_of(rank)
                        selector.unregister(self._peers[rank])
                    if not content and not said_goodbye:
                        self.fail(PeerLostError(rank, "the peer monitor"))

    def _expect_no_vote_of(self, peer: int) -> None:
        """Expect no vote of this peer any more: it came with a failure, or will never come."""
        self._last_heard_of.add(peer)
        if self._last_heard_of >= self._peers.keys():
            self._all_heard.set()

    def _handle(self, peer: int, message: dict[str, Any]) -> bool:
        """Handle a peer's message; return True if it is a goodbye."""
        if "news" in message:
            step, slots = message["news"]
            with self._lock:
                self._peer_votes[peer] = (int(step), slots)
        if "lost" in message or "aborted" in message:
            self._expect_no_vote_of(peer)
        match message:
            case {"lost": int(rank), "doing": str(doing)}:
                self.fail(PeerLostError(rank, doing))
            case {"aborted": str(reason), "rank": int(rank)}:
                self.fail(AbortedError(reason, rank=rank))
            case {"where": int()}:
                self._send(peer, {"here": self._position()})
            case {"here": dict(position)}:
                self._answers[peer] = position
            case {"bye": int()}:
                return True
            case _:
                print(f"unknown message from rank {peer}: {message}", flush=True)
        return False


def _connect(
    store: Store,
    rank: int,
    size: int,
    *,
    host: str,
    secret: bytes,
    deadline_s: float,
    check_cancelled: Callable[[], None],
) -> dict[int, socket.socket]:
    """Connect every pair of ranks: the higher rank connects, the lower one listens.

    Both prove that they know the secret; others are sent away. Over a long link each question to
    the store and each connection takes round trips, so all addresses are read at once, and many
    ranks are connected to at a time.
    """
    deadline = time.monotonic() + deadline_s
    others = [each for each in range(size) if each != rank]
    with listener_at(host, backlog=size + STRANGERS_MAX) as server:
        meeting = _Meeting(server, secret, rank, size)
        thread = threading.Thread(target=meeting.accept, daemon=True, name="peer acceptor")
        thread.start()
        calls = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="peer caller")
        try:
            store.set(_key_of(rank), json.dumps(server.getsockname()[:2]))
            announce(store, _PREFIX, size)
            while not are_all_there(store, _PREFIX):
                check_cancelled()
                if time.monotonic() > deadline:
                    raise _late_error(_find_without_address(store, others))
                time.sleep(pause_s(size))
            lower = [_key_of(each) for each in range(rank)]
            for each, address in enumerate(store.multi_get(lower) if lower else ()):
                calls.submit(meeting.call, each, json.loads(address), deadline)
            while len(meeting.peers) < size - 1:
                check_cancelled()
                if meeting.failure is not None:
                    raise meeting.failure
                if time.monotonic() > deadline:
                    raise _late_error([each for each in others if each not in meeting.peers])
                time.sleep(_POLL_S)
        except BaseException:
            meeting.end()
            for peer in meeting.peers.values():
                peer.close()
            raise
        finally:
            meeting.end()
            calls.shutdown(wait=False, cancel_futures=True)
            thread.join()
    for peer in meeting.peers.values():
        peer.settimeout(1.0)  # Messages are short: a peer that does not read them is stuck.
        _notice_power_loss(peer)
    return meeting.peers


def _key_of(rank: int) -> str:
    return f"{_PREFIX}/{rank}"


def _find_without_address(store: Store, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not stored their address; asks for halves, since few are late."""
    if not ranks or store.check([_key_of(each) for each in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return [
        *_find_without_address(store, ranks[:half]),
        *_find_without_address(store, ranks[half:]),
    ]


def _late_error(ranks: Sequence[int]) -> TimeoutError:
    return TimeoutError(f"ranks that did not connect in time: {', '.join(map(str, ranks))}")


def _notice_power_loss(peer: socket.socket) -> None:
    """Switch on TCP keep-alive, since a machine that loses power does not close its connections."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
    silent_ms = 1000 * KEEPALIVE_S * (KEEPALIVES + 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_ms)


@dataclass(eq=False)
class _Meeting:
    """Connects one rank with the others, each in a thread, so that a silent one delays no other."""

    server: socket.socket
    secret: bytes
    rank: int
    size: int
    peers: dict[int, socket.socket] = field(default_factory=dict)
    failure: OSError | None = None
    """Why a lower rank could not be connected to."""
    _greeting: int = 0
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """Keep no further connections."""
        with self._lock:
            self._is_over = True

    def call(self, lower: int, address: Sequence[Any], deadline: float) -> None:
        """Connect to a lower rank."""
        left_s = max(deadline - time.monotonic(), _POLL_S)
        try:
            peer = socket.create_connection((address[0], address[1]), timeout=left_s)
        except OSError as error:
            self.failure = error
            return
        try:
            peer.settimeout(min(GREETING_S, left_s))
            prove(peer, self.secret, b"", listener=lower, caller=self.rank)
            with self._lock:
                if self._is_over:
                    raise ConnectionError("the meeting is over")
                self.peers[lower] = peer
        except OSError as error:
            self.failure = error
            peer.close()

    def accept(self) -> None:
        """Greet everybody who connects, until the end."""
        self.server.settimeout(_POLL_S)
        while not self._is_over:
            try:
                peer, _ = self.server.accept()
            except OSError:
                continue
            with self._lock:
                is_crowded = self._greeting >= self.size + STRANGERS_MAX
                self._greeting += not is_crowded
            if is_crowded:
                peer.close()
            else:
                threading.Thread(target=self._greet, args=(peer,), daemon=True).start()

    def _greet(self, peer: socket.socket) -> None:
        """Challenge a caller, and accept it if it is the rank that it says."""
        try:
            peer.settimeout(GREETING_S)
            caller = receive_proof(peer, self.secret, b"", self.rank)
            with self._lock:
                if self._is_over or caller in self.peers or not self.rank < caller < self.size:
                    raise ConnectionError(f"it says that it is rank {caller}")
                self.peers[caller] = peer
        except OSError as error:
            print(f"peer monitor: a connection was refused: {error}", flush=True)
            peer.close()
        finally:
            with self._lock:
                self._greeting -= 1
