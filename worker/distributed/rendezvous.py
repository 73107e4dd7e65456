"""Rendezvous of a generation's ranks: a TCP store in rank 0 that ends with its process.

From other machines it is reached through a gate that asks for the generation's secret.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from worker.distributed.interface import Transport
from worker.distributed.process_groups import ProcessTransport
from worker.distributed.rank_protocol import announce_code, check_code
from worker.distributed.single_rank import SingleRankTransport
from worker.distributed.store_gate import (
    LOOPBACK,
    StoreRelay,
    connect_gate,
    open_gate,
    open_tunnel,
)

RENDEZVOUS_S = 60.0
"""Seconds in which a rank must reach the store of rank 0."""
_POLL_S = 0.02
_SECRET = "#"


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """One rank of a generation, and the host at which its peers reach it."""

    generation: int
    rank: int
    ranks: int
    host: str
    device: torch.device
    wait_s: float
    """Deadline of a collective in seconds; a rank that dies is noticed at once."""


def serve_store(listening: socket.socket, timeout_s: float) -> Store:
    """Open a store on a bound socket, which the store takes over and closes."""
    host, port = listening.getsockname()[:2]
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    return TCPStore(host, port, is_master=True, master_listen_fd=listening.detach(), **options)


@dataclass(eq=False)
class RankStore:
    """The store in which the ranks of a generation find each other, and the way to it."""

    address: str
    """The gate's address, with the generation's secret."""
    store: Store
    relay: StoreRelay

    def close(self) -> None:
        """Close the way to the store."""
        self.relay.close()


def open_store(info: RendezvousInfo) -> RankStore:
    """Open the store, as rank 0, with a new secret.

    The agents pass the address on, and all ranks prove to each other that they know the secret.
    """
    listening = socket.create_server((LOOPBACK, 0), backlog=info.ranks)
    place = listening.getsockname()[:2]
    store, secret = serve_store(listening, RENDEZVOUS_S), secrets.token_hex(16)
    announce_code(store)
    gate = open_gate(info.host, secret.encode(), place, info.ranks)
    return RankStore(f"{info.host}:{gate.port}{_SECRET}{secret}", store, gate)


def secret_of(address: str) -> bytes:
    """Return the secret of a generation."""
    return address.partition(_SECRET)[2].encode()


def join_store(address: str, rank: int, check_cancelled: Callable[[], None]) -> RankStore:
    """Connect to the store that rank 0 has opened.

    Raises ``OtherCodeError`` if the two run code that does not train together.
    """
    host, _, port = address.partition(_SECRET)[0].rpartition(":")
    gate, secret = (host, int(port)), secret_of(address)
    first = _reach(gate, secret, rank, check_cancelled)
    tunnel = open_tunnel(gate, secret, rank, first)
    limit = timedelta(seconds=RENDEZVOUS_S)
    try:
        store = TCPStore(LOOPBACK, tunnel.port, is_master=False, timeout=limit)
        check_code(store, rank)
    except BaseException:
        tunnel.close()
        first.close()
        raise
    return RankStore(address, store, tunnel)


def _reach(
    gate: tuple[str, int], secret: bytes, rank: int, check_cancelled: Callable[[], None]
) -> socket.socket:
    """Connect to the gate as soon as it is open."""
    deadline = time.monotonic() + RENDEZVOUS_S
    while True:
        check_cancelled()
        try:
            return connect_gate(gate, secret, rank)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def open_transport(
    info: RendezvousInfo,
    rank_store: RankStore | None,
    check_cancelled: Callable[[], None],
    on_stuck: Callable[[str], None] = lambda _: None,
) -> Transport:
    """Connect to the other ranks; a single rank needs no store."""
    if info.ranks == 1:
        return SingleRankTransport()
    assert rank_store is not None, "several ranks need a store"
    return ProcessTransport(
        rank_store.store,
        info.rank,
        info.ranks,
        generation=str(info.generation),
        device=info.device,
        deadline_s=info.wait_s,
        host=info.host,
        secret=secret_of(rank_store.address),
        check_cancelled=check_cancelled,
        on_stuck=on_stuck,
    )
