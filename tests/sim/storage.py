"""A store as etcd is one: revisions, transactions with compares, leases; and it can be away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.sim.clock import Clock


@dataclass
class Entry:
    value: object
    created: int
    lease: int | None


@dataclass
class Lease:
    ttl_s: float
    ends_at: float


class Unanswered:
    """The store was away, or its answer was lost: the order may have been carried out."""


class Store:
    """The data and who may change it; every change is kept in ``history``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, Lease] = {}
        self.history: list[tuple[float, int, str, object]] = []
        self.is_up = True
        clock.after(0.5, self._end_leases)

    def take(self, prefix: str) -> dict[str, object]:
        return {k: e.value for k, e in sorted(self.entries.items()) if k.startswith(prefix)}

    def get(self, key: str) -> object:
        entry = self.entries.get(key)
        return None if entry is None else entry.value

    def created(self, key: str) -> int:
        entry = self.entries.get(key)
        return 0 if entry is None else entry.created

    def put(self, key: str, value: object, lease: int | None = None) -> int:
        self.revision += 1
        entry = self.entries.get(key)
        created = self.revision if entry is None else entry.created
        self.entries[key] = Entry(value, created, lease)
        self.history.append((self.clock.now, self.revision, key, value))
        return self.revision

    def delete(self, key: str) -> None:
        if self.entries.pop(key, None) is not None:
            self.revision += 1
            self.history.append((self.clock.now, self.revision, key, None))

    def grant(self, ttl_s: float) -> int:
        self.revision += 1
        self.leases[self.revision] = Lease(ttl_s, self.clock.now + ttl_s)
        return self.revision

    def keep(self, lease: int) -> bool:
        if lease not in self.leases:
            return False
        self.leases[lease].ends_at = self.clock.now + self.leases[lease].ttl_s
        return True

    def revoke(self, lease: int) -> None:
        self.leases.pop(lease, None)
        for key in [k for k, e in self.entries.items() if e.lease == lease]:
            self.delete(key)

    def go_away(self) -> None:
        self.is_up = False

    def come_back(self) -> None:
        self.is_up = True
        for lease in self.leases.values():
            lease.ends_at = max(lease.ends_at, self.clock.now + lease.ttl_s)

    def _end_leases(self) -> None:
        if self.is_up:
            for id_ in [i for i, lease in self.leases.items() if lease.ends_at <= self.clock.now]:
                self.revoke(id_)
        self.clock.after(0.25, self._end_leases)


class Client:
    """One process's way to the store: slow, sometimes without an answer, sometimes cut."""

    def __init__(self, store: Store, random: Random, *, loss: float) -> None:
        self.store, self.random, self.loss = store, random, loss
        self.is_cut = False

    def ask(self, order: Callable[[Store], object], done: Callable[[object], None]) -> None:
        clock = self.store.clock
        there, back = self.random.uniform(0.001, 0.05), self.random.uniform(0.001, 0.05)
        is_asked = self.random.random() >= self.loss
        is_heard = self.random.random() >= self.loss

        def arrive() -> None:
            if not (is_asked and self.store.is_up) or self.is_cut:
                clock.after(1.0, lambda: done(Unanswered()))
                return
            answer = order(self.store)
            if is_heard and not self.is_cut:
                clock.after(back, lambda: done(answer))
            else:
                clock.after(1.0, lambda: done(Unanswered()))

        clock.after(there, arrive)
