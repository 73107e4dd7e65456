"""Two ranks prove to each other over a connection that they know the generation's secret."""

from __future__ import annotations

import hmac
import secrets
import socket

GREETING_S = 30.0
"""Seconds for a caller to prove that it knows the secret."""
STRANGERS_MAX = 64
"""Connections, besides one for each rank, that may be unproven at a time."""
_NONCE_BYTES = 16


def receive_proof(peer: socket.socket, secret: bytes, purpose: bytes, listener: int) -> int:
    """Challenge a caller, answer its challenge, return its rank; else raise ``ConnectionError``."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    peer.sendall(ours)
    caller = int.from_bytes(receive_exactly(peer, 4), "little")
    theirs, about = receive_exactly(peer, _NONCE_BYTES), _about(purpose, listener, caller)
    expected = _mac(secret, b"caller", about, ours, theirs)
    if not hmac.compare_digest(receive_exactly(peer, len(expected)), expected):
        raise ConnectionError("it does not know the generation's secret")
    peer.sendall(_mac(secret, b"listener", about, ours, theirs))
    return caller


def prove(
    peer: socket.socket, secret: bytes, purpose: bytes, *, listener: int, caller: int
) -> None:
    """Answer a listener's challenge, and check its answer to ours."""
    theirs = receive_exactly(peer, _NONCE_BYTES)
    ours, about = secrets.token_bytes(_NONCE_BYTES), _about(purpose, listener, caller)
    proof = _mac(secret, b"caller", about, theirs, ours)
    peer.sendall(caller.to_bytes(4, "little") + ours + proof)
    answer = receive_exactly(peer, len(proof))
    if not hmac.compare_digest(answer, _mac(secret, b"listener", about, theirs, ours)):
        raise ConnectionError(f"rank {listener} does not know the generation's secret")


def receive_exactly(peer: socket.socket, count: int) -> bytes:
    """Receive exactly ``count`` bytes."""
    content = b""
    while len(content) < count:
        received = peer.recv(count - len(content))
        if not received:
            raise ConnectionError("a peer closed its connection before it sent its rank")
        content += received
    return content


def _about(purpose: bytes, listener: int, caller: int) -> bytes:
    return listener.to_bytes(4, "little") + caller.to_bytes(4, "little") + purpose


def _mac(secret: bytes, *parts: bytes) -> bytes:
    """Hash the parts; all but the first have a fixed length for each purpose."""
    return hmac.digest(secret, b"".join(parts), "sha256")
