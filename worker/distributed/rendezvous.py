"""Rendezvous of a generation's ranks: a TCP store in rank 0 that ends with its process."""

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
from worker.distributed.single_rank import SingleRankTransport

RENDEZVOUS_S = 60.0
"""Seconds for all ranks to arrive."""
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


def open_store(info: RendezvousInfo) -> tuple[Store, str]:
    """Open the store, as rank 0, and return it with the meeting: its address and a new secret.

    The agents pass the meeting on, and all ranks prove to each other that they know the secret.
    """
    listening = socket.create_server((info.host, 0), backlog=info.ranks)
    address = f"{info.host}:{listening.getsockname()[1]}{_SECRET}{secrets.token_hex(16)}"
    return serve_store(listening, RENDEZVOUS_S), address


def secret_of(meeting: str) -> bytes:
    """Return the secret of a generation."""
    return meeting.partition(_SECRET)[2].encode()


def join_store(meeting: str, check_cancelled: Callable[[], None]) -> Store:
    """Connect to the store that rank 0 has opened."""
    host, _, port = meeting.partition(_SECRET)[0].rpartition(":")
    deadline = time.monotonic() + RENDEZVOUS_S
    while True:
        check_cancelled()
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=RENDEZVOUS_S))


def open_transport(
    info: RendezvousInfo, store: Store | None, meeting: str, check_cancelled: Callable[[], None]
) -> Transport:
    """Connect to the other ranks; a single rank needs no store."""
    if info.ranks == 1:
        return SingleRankTransport()
    assert store is not None, "several ranks need a store"
    return ProcessTransport(
        store,
        info.rank,
        info.ranks,
        generation=str(info.generation),
        device=info.device,
        deadline_s=info.wait_s,
        host=info.host,
        secret=secret_of(meeting),
        check_cancelled=check_cancelled,
    )
