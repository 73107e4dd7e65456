"""Ranks admit only those that know the generation's secret."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import Counter

import pytest
from torch._C._distributed_c10d import HashStore

from worker.distributed import process_groups
from worker.distributed.interface import PeerLostError
from worker.distributed.peer_monitor import PeerMonitor
from worker.distributed.presence import announce
from worker.distributed.proof import receive_proof
from worker.distributed.rendezvous import secret_of

SECRET = b"of this generation"


def start(store, rank, size, found, secret=SECRET):
    """One rank, in a thread."""

    def connect():
        try:
            found[rank] = PeerMonitor(
                store, rank, size, host="127.0.0.1", secret=secret, deadline_s=3.0,
                on_failure=lambda _: None,
            )  # fmt: skip
        except OSError as error:
            found[rank] = error

    thread = threading.Thread(target=connect)
    thread.start()
    return thread


def test_ranks_that_know_the_secret_meet_though_strangers_connect():
    store, found = HashStore(), {}
    threads = [start(store, 0, 3, found)]
    address = tuple(json.loads(store.get("watch/0")))
    silent = socket.create_connection(address)
    liar = socket.create_connection(address)
    liar.recv(16)
    liar.sendall((1).to_bytes(4, "little") + bytes(16) + bytes(32))
    assert liar.recv(1) == b"", "it is sent away"
    threads += [start(store, rank, 3, found) for rank in (1, 2)]
    for thread in threads:
        thread.join()
    assert [sorted(found[rank]._peers) for rank in range(3)] == [[1, 2], [0, 2], [0, 1]]
    for rank in range(3):
        found[rank].close()
    silent.close()
    liar.close()


def test_vote_of_a_peer_is_awaited_though_it_answered_a_question_before():
    store, found = HashStore(), {}
    threads = [start(store, rank, 3, found) for rank in range(3)]
    for thread in threads:
        thread.join()
    asked, goes_on = threading.Event(), threading.Event()

    def position():
        asked.set()
        goes_on.wait()
        return {}

    assert found[0].ask_positions(5.0).keys() == {1, 2}
    found[1].vote, found[1]._position = (4, [2.0]), position
    questions = threading.Thread(target=found[2].ask_positions, args=(5.0,))
    questions.start()
    asked.wait()  # Rank 1 reads nothing now.
    found[0].fail(PeerLostError(2, "vote"))
    found[2].close()
    threading.Timer(0.1, goes_on.set).start()
    assert found[0].last_votes(10.0) == [(4, [2.0])]
    for rank in (0, 1):
        found[rank].close()
    questions.join()


def test_machine_that_loses_power_is_noticed_within_5_s():
    """It closes no connection, so the kernel must ask and give up."""
    store, found = HashStore(), {}
    for thread in [start(store, rank, 2, found) for rank in range(2)]:
        thread.join()
    for rank in (0, 1):
        peer, tcp = found[rank]._peers[1 - rank], socket.IPPROTO_TCP
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle = peer.getsockopt(tcp, socket.TCP_KEEPIDLE)
        between, count = (
            peer.getsockopt(tcp, each) for each in (socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + between * count == 5
        assert peer.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 5000, "unread data counts, too"
    for rank in (0, 1):
        found[rank].close()


class InParts:
    """A peer whose connection is so full that messages are sent in two parts."""

    def __init__(self, peer):
        self._peer = peer
        self.sent, self._begun = [], threading.Semaphore(0)

    def sendall(self, line):
        self._begun.release()
        self.sent.append(line[:5])
        self._begun.acquire()
        self._begun.acquire(timeout=0.2)  # Until another thread sends, too.
        self.sent.append(line[5:])

    def __getattr__(self, name):
        return getattr(self._peer, name)


def test_messages_of_several_threads_do_not_mix():
    store, found = HashStore(), {}
    for thread in [start(store, rank, 2, found) for rank in range(2)]:
        thread.join()
    peer = found[0]._peers[1] = InParts(found[0]._peers[1])
    threads = [threading.Thread(target=found[0].ask_positions, args=(0.0,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = b"".join(peer.sent).splitlines()
    assert [json.loads(line) for line in lines] == [{"where": 0}] * 3
    found[0]._peers[1] = peer._peer
    for rank in (0, 1):
        found[rank].close()


@pytest.mark.slow
def test_a_rank_with_another_secret_is_not_admitted():
    store, found = HashStore(), {}
    threads = [start(store, 0, 2, found), start(store, 1, 2, found, b"of another generation")]
    for thread in threads:
        thread.join()
    assert isinstance(found[1], ConnectionError)
    assert isinstance(found[0], TimeoutError), "nobody else came"


def test_the_address_holds_the_secret():
    assert secret_of("10.0.0.1:4000#00ff") == b"00ff"
    assert secret_of("") == b""


class Hasty(PeerMonitor):
    """Its thread notices a loss before the constructor returns."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.fail(PeerLostError(1, "the peer monitor"))


def test_peer_that_is_lost_before_the_transport_is_complete_is_named(monkeypatch):
    monkeypatch.setattr(process_groups, "PeerMonitor", Hasty)
    with (
        pytest.raises(PeerLostError, match="rank 1"),
        # It may return before it has looked.
        contextlib.closing(process_groups.ProcessTransport(HashStore(), 0, 1)) as transport,
    ):
        transport.check()


def test_ranks_that_do_not_connect_are_named():
    store, found = HashStore(), {}
    for thread in [start(store, rank, 4, found) for rank in (0, 2)]:
        thread.join()
    assert str(found[0]) == "ranks that did not connect in time: 1, 3"
    assert str(found[2]) == "ranks that did not connect in time: 1, 3"


class Counting:
    """A store that counts what it is asked for."""

    def __init__(self):
        self._store, self.asked = HashStore(), Counter()

    def __getattr__(self, name):
        def ask(*given):
            self.asked[name, str(given[0])] += 1
            return getattr(self._store, name)(*given)

        return ask


def test_each_rank_asks_a_few_questions_of_the_store_however_many_ranks_there_are():
    store, found = Counting(), {}
    for thread in [start(store, rank, 6, found) for rank in range(6)]:
        thread.join()
    for rank in range(6):
        assert len(found[rank]._peers) == 5
        found[rank].close()
    assert sum(n for (name, _), n in store.asked.items() if name in {"get", "multi_get"}) == 5
    assert {what for name, what in store.asked if name == "check"} == {"['watch/all']"}


def test_a_rank_connects_to_another_while_the_first_one_is_silent():
    store, found = HashStore(), {}
    first, second = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    for rank, server in enumerate((first, second)):
        store.set(f"watch/{rank}", json.dumps(server.getsockname()))
        announce(store, "watch", 3)
    thread = start(store, 2, 3, found)
    callers = []
    for server in (second, first):  # The first one answers last.
        server.settimeout(2.0)
        callers.append(server.accept()[0])
        receive_proof(callers[-1], SECRET, b"", 2 - len(callers))
    thread.join()
    assert sorted(found[2]._peers) == [0, 1]
    found[2].close()
    for each in (first, second, *callers):
        each.close()
