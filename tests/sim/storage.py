"""A simulated etcd: revisions, compares, leases, watches, compaction, and outages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.sim.clock import Clock, Process


@dataclass
class Entry:
    value: object
    created: int
    lease: int | None


@dataclass
class Lease:
    ttl_s: float
    ends_at: float


@dataclass(eq=False)
class Watch:
    prefix: str
    process: Process
    woken: Callable[[], None]
    lost: Callable[[], None]


class Unanswered:
    """The store was down or its answer was lost: the request may have taken effect."""


class Store:
    """The data and its leases; ``changed`` is called with each change."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock, self.random = clock, random
        self.revision = 1
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, Lease] = {}
        self.watches: list[Watch] = []
        self.changed: Callable[[str, object], None] = lambda _key, _value: None
        self.is_up = True
        self.wire: Callable[[object], object] = lambda value: value
        """What a reader makes of a value that was written."""
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
        value = self.wire(value)
        entry = self.entries.get(key)
        created = self.revision if entry is None else entry.created
        self.entries[key] = Entry(value, created, lease)
        self._changed(key, value)
        return self.revision

    def delete(self, key: str) -> None:
        if self.entries.pop(key, None) is not None:
            self.revision += 1
            self._changed(key, None)

    def _changed(self, key: str, value: object) -> None:
        self.changed(key, value)
        for watch in self.watches:
            if watch.process.is_up and key.startswith(watch.prefix):
                watch.process.after(self.random.uniform(0.001, 0.1), watch.woken)

    # ---- leases ---------------------------------------------------------------------------

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

    def _end_leases(self) -> None:
        if self.is_up:
            for id_ in [i for i, lease in self.leases.items() if lease.ends_at <= self.clock.now]:
                self.revoke(id_)
        self.watches = [watch for watch in self.watches if watch.process.is_up]
        self.clock.after(0.5, self._end_leases)

    # ---- faults ---------------------------------------------------------------------------

    def fail(self) -> None:
        self.is_up = False
        self.drop_watches(1.0)

    def recover(self) -> None:
        self.is_up = True
        for lease in self.leases.values():
            lease.ends_at = max(lease.ends_at, self.clock.now + lease.ttl_s)

    def drop_watches(self, share: float) -> None:
        """End watches, as an outage or a compaction of pending changes does."""
        gone = [watch for watch in self.watches if self.random.random() < share]
        self.watches = [watch for watch in self.watches if watch not in gone]
        for watch in gone:
            watch.process.after(self.random.uniform(0.0, 1.0), watch.lost)


class Client:
    """One process's connection to the store: slow, with lost answers, sometimes cut."""

    def __init__(self, store: Store, process: Process, *, loss: float) -> None:
        self.store, self.process, self.loss = store, process, loss
        self.random = store.random
        self.is_cut = False

    def ask(self, request: Callable[[Store], object], done: Callable[[object], None]) -> None:
        clock, process = self.store.clock, self.process
        there, back = self.random.uniform(0.001, 0.05), self.random.uniform(0.001, 0.05)
        is_asked = self.random.random() >= self.loss
        is_heard = self.random.random() >= self.loss

        def arrive() -> None:
            if not (is_asked and self.store.is_up) or self.is_cut:
                process.after(1.0, lambda: done(Unanswered()))
                return
            answer = request(self.store)
            if is_heard and not self.is_cut:
                process.after(back, lambda: done(answer))
            else:
                process.after(1.0, lambda: done(Unanswered()))

        clock.after(there, arrive)

    def watch(self, prefix: str, woken: Callable[[], None]) -> None:
        """Call back at each change; a lost watch is restarted and misses earlier changes."""

        def begin() -> None:
            self.ask(follow, begun)

        def follow(store: Store) -> None:
            if watch not in store.watches:
                store.watches.append(watch)

        def begun(answer: object) -> None:
            if isinstance(answer, Unanswered):
                self.process.after(1.0, begin)

        def hear() -> None:
            if not self.is_cut:
                woken()

        watch = Watch(prefix, self.process, hear, begin)
        begin()
