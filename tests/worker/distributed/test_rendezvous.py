"""The ranks' store is reached with the generation's secret only."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from worker.distributed import rank_protocol
from worker.distributed.proof import STRANGERS_MAX
from worker.distributed.rank_protocol import OtherCodeError
from worker.distributed.rendezvous import (
    RankStore,
    RendezvousInfo,
    join_store,
    open_store,
    open_transport,
    secret_of,
)
from worker.distributed.store_gate import connect_gate
from worker.version import own_version


@pytest.fixture
def rank_store():
    info = RendezvousInfo(1, 0, 3, "127.0.0.1", torch.device("cpu"), 5.0)
    with contextlib.closing(open_store(info)) as opened:
        yield opened


def join(rank_store: RankStore, rank: int):
    return contextlib.closing(join_store(rank_store.address, rank, lambda: None))


def gate_of(rank_store: RankStore) -> tuple[str, int]:
    return "127.0.0.1", rank_store.relay.port


def test_ranks_with_the_secret_share_a_store(rank_store):
    long = bytes(range(256)) * 20_000
    with join(rank_store, 1) as one, join(rank_store, 2) as two:
        rank_store.store.set("zero", "a")
        one.store.set("one", long)
        assert two.store.get("zero") == b"a"
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(two.store.get, "late")
            one.store.set("late", "b")
            assert waiting.result() == b"b"
        assert rank_store.store.get("one") == two.store.get("one") == long
    with join(rank_store, 1) as again:
        assert again.store.get("zero") == b"a"


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ranks_meet_at_an_ipv6_address():
    places = [RendezvousInfo(1, rank, 2, "::1", torch.device("cpu"), 5.0) for rank in range(2)]
    with contextlib.closing(open_store(places[0])) as first, join(first, 1) as second:

        def sum_of(place: RendezvousInfo, rank_store: RankStore) -> float:
            with contextlib.closing(open_transport(place, rank_store, lambda: None)) as transport:
                transport.open([(0, 1)], [])
                total = torch.ones(1) + place.rank
                return float(transport.group((0, 1)).all_reduce(total))

        with ThreadPoolExecutor() as pool:
            sums = list(pool.map(sum_of, places, (first, second)))
    assert sums == [3.0, 3.0]


@pytest.mark.parametrize("said", [b"", b"\0" * 52, b"\x01\x3c\x85\xf3\x03" + b"x" * 100])
def test_an_unauthenticated_connection_gets_no_byte_of_the_store(rank_store, said):
    """Nor does one who speaks the store's own protocol, whose first byte is a query."""
    with socket.create_connection(gate_of(rank_store), timeout=10.0) as stranger:
        assert len(stranger.recv(100)) == 16  # The challenge.
        with contextlib.suppress(OSError):  # It may have been refused by now.
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    rank_store.store.set("a", "b")
    with join(rank_store, 1) as one:
        assert one.store.get("a") == b"b"


def test_another_secret_is_refused(rank_store):
    with pytest.raises(OSError, match=r"closed|reset"):
        connect_gate(gate_of(rank_store), b"another", 1)


def test_silent_strangers_do_not_delay_the_ranks(rank_store):
    with contextlib.ExitStack() as strangers:
        for _ in range(STRANGERS_MAX):
            strangers.enter_context(socket.create_connection(gate_of(rank_store), timeout=5.0))
        with join(rank_store, 1) as one:
            one.store.set("a", "b")
            assert rank_store.store.get("a") == b"b"


def test_the_store_itself_listens_on_the_loopback_device_only(rank_store):
    assert rank_store.store.host == "127.0.0.1"
    assert rank_store.store.port != rank_store.relay.port
    assert secret_of(rank_store.address)


@pytest.mark.parametrize(("ours", "drained"), [(99, "the node of rank 0"), (0, "this node")])
def test_ranks_of_two_versions_refuse_each_other(rank_store, monkeypatch, ours, drained):
    first = f"rank 0 Sailor {own_version()} (ranks' protocol {rank_protocol.SPEAKS})"
    monkeypatch.setattr(rank_protocol, "SPEAKS", ours)
    monkeypatch.setattr(rank_protocol, "VERSION", "9.9")
    with pytest.raises(OtherCodeError) as raised:
        join(rank_store, 1)
    assert str(raised.value) == (
        f"rank 1 runs Sailor 9.9 (ranks' protocol {ours}), and {first}, which do not train"
        f" together: drain {drained} (sailorctl drain NODE) and restart its agent, so that its"
        " workers are of one version"
    )
    assert not [each for each in threading.enumerate() if each.name == "store tunnel"]


def test_another_release_of_the_same_number_trains_along(rank_store, monkeypatch):
    monkeypatch.setattr(rank_protocol, "VERSION", "9.9")
    with join(rank_store, 1) as one:
        one.store.set("a", "b")


def test_a_first_rank_from_before_there_was_a_number_is_refused(rank_store):
    assert rank_store.store.delete_key("code")
    with pytest.raises(OtherCodeError, match=r"rank 0 an earlier version \(ranks' protocol 0\)"):
        join(rank_store, 1)
