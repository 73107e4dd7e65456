"""Over a long link a group of many ranks opens in as many round trips as one of two."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from worker.distributed.backends import GlooBackends
from worker.distributed.rendezvous import serve_store


class CountedWay:
    """A way to a store that counts how often its user asks after it has had an answer."""

    def __init__(self, port: int) -> None:
        self.turns, self._last = 0, "answer"
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._store = port
        threading.Thread(target=self._carry, daemon=True).start()

    def _carry(self) -> None:
        with self._listening:
            user, _ = self._listening.accept()
        store = socket.create_connection(("127.0.0.1", self._store))
        back = threading.Thread(target=self._copy, args=(store, user, "answer"), daemon=True)
        back.start()
        self._copy(user, store, "question")
        back.join()

    def _copy(self, source: socket.socket, target: socket.socket, what: str) -> None:
        with source, target:
            while data := source.recv(1 << 16):
                self.turns += what == "question" != self._last
                self._last = what
                target.sendall(data)


def turns_of_last(size: int) -> int:
    """Return the round trips to the store with which the last rank opens a group."""
    master = serve_store(socket.create_server(("127.0.0.1", 0)), 60.0)
    way = CountedWay(master.port)
    ports = [*(master.port for _ in range(size - 1)), way.port]
    limit = timedelta(seconds=60)
    stores = [TCPStore("127.0.0.1", port, is_master=False, timeout=limit) for port in ports]
    groups, before = [], way.turns

    def join(rank: int) -> None:
        store = PrefixStore("x", stores[rank])
        groups.append(GlooBackends("127.0.0.1", 60.0).open("x", store, rank, size))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(groups) == size
    return way.turns - before


def test_round_trips_of_a_group_do_not_grow_with_its_ranks() -> None:
    assert turns_of_last(6) == turns_of_last(2) <= 4
