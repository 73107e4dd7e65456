"""Where the ranks of a generation meet: a store that lives in rank 0, and dies with it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from worker.distributed.in_process import ThreadWorld
from worker.distributed.interface import Transport
from worker.distributed.process_groups import ProcessTransport

RENDEZVOUS_S = 60.0
"""For all ranks to come."""
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """One rank of a generation, and the host that others reach it at."""

    generation: int
    rank: int
    ranks: int
    host: str
    device: torch.device
    wait_s: float
    """For a rank that lives, in a collective; one that has died is noticed at once."""


def open_store(party: RendezvousInfo) -> tuple[Store, str]:
    """Open the place, as rank 0, and say where it is."""
    with socket.create_server((party.host, 0), backlog=party.ranks) as server:
        port = server.getsockname()[1]
        taken = server.detach()
    shared: dict[str, Any] = {"timeout": timedelta(seconds=RENDEZVOUS_S), "wait_for_workers": False}
    store = TCPStore(party.host, port, is_master=True, master_listen_fd=taken, **shared)
    return store, f"{party.host}:{port}"


def join_store(place: str, check_cancelled: Callable[[], None]) -> Store:
    """Come to the place that rank 0 has opened."""
    host, _, port = place.rpartition(":")
    deadline = time.monotonic() + RENDEZVOUS_S
    while True:
        check_cancelled()
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_S)
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=RENDEZVOUS_S))


def open_transport(
    party: RendezvousInfo, store: Store | None, check_cancelled: Callable[[], None]
) -> Transport:
    """Open the way to the others; one that is alone needs no place."""
    if party.ranks == 1:
        return ThreadWorld(1).transport(0)
    assert store is not None, "several ranks meet somewhere"
    return ProcessTransport(
        store,
        party.rank,
        party.ranks,
        generation=str(party.generation),
        device=party.device,
        deadline_s=party.wait_s,
        host=party.host,
        check_cancelled=check_cancelled,
    )
