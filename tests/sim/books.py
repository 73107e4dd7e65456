"""The goodput ledger of the simulated cluster, beside what its machines really cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from agents.protocol.codec import decode, encode
from sailord.goodput.core.ledger import Ledger, fold, gpus_of
from sailord.goodput.core.shares import Share, Shares, divided, resumed
from sailord.goodput.core.usage_sample import Rented, Renting, sample_usage

if TYPE_CHECKING:
    from tests.sim.heads import Head
    from tests.sim.machines import Machine
    from tests.sim.storage import Store

KEY = "/goodput"
SAVE_S = 10.0
USD_PER_HOUR = 29.76
"""Of a machine, which the provider bills from its boot to its end."""


class Books:
    """Each head keeps a ledger while it leads, and stores it for the next one."""

    def __init__(self) -> None:
        self.of_head: dict[Head, tuple[int, Ledger, Shares]] = {}
        self.stored: tuple[bytes, ...] = ()
        """The ledger, and its shares."""
        self.saved_at = 0.0
        self.saved_gpus = -1
        self.leaders = 0
        self.ended: dict[str, float] = {}
        self.from_s: float | None = None
        self.until_s = 0.0
        self.last = Ledger()
        """The ledger of the leader, after its last decision at ``until_s``, ..."""
        self.last_shares: Shares = {}
        """... by day and by job."""

    def decided(self, head: Head) -> None:
        """Book what a head sees after a decision."""
        state, world = head.state, head.world
        if state.term is None:
            return
        known = self.of_head.get(head)
        if known is None or known[0] != state.term:
            self.leaders += 1
            stored = decode(Ledger, self.stored[0]) if self.stored else Ledger()
            kept = [decode(Share, each) for each in self.stored[1:]]
            known = state.term, stored, resumed(kept, stored)
        ledger, step = known[1], known[1].step
        machines, now = list(world.machines.values()), world.clock.now
        renting = Renting(
            tuple(
                Rented(m.name, m.record.gpus, USD_PER_HOUR, True, False)
                for m in machines
                if self._end_of(m) is None
            ),
            frozenset(m.name for m in machines if self._end_of(m) is not None),
            self.bill(head, now),
            sum(m.record.gpus * round(s * 1e6) for m, s in self._paid_s(head, 0.0, now)),
        )
        sample = sample_usage(
            state,
            lambda _: None,
            renting,
            trained=None if step is None else (step.job, step.generation),
        )
        ledger = fold(ledger, sample)
        shares = divided(known[2], known[1], ledger)
        self.of_head[head] = state.term, ledger, shares
        if world.store.get("/leader") == head.name and head.lease is not None:
            self.from_s = world.clock.now if self.from_s is None else self.from_s
            self.until_s, self.last, self.last_shares = world.clock.now, ledger, shares
            is_news = gpus_of(ledger) != self.saved_gpus
            if is_news or world.clock.now >= self.saved_at + SAVE_S:
                self.saved_at, self.saved_gpus = world.clock.now, gpus_of(ledger)
                texts = encode(ledger), *map(encode, shares.values())
                head._write_if_leader(partial(self._store, texts))

    def _store(self, texts: tuple[bytes, ...], _: Store) -> None:
        self.stored = texts

    def _end_of(self, machine: Machine) -> float | None:
        if not machine.is_up:
            self.ended.setdefault(machine.id, machine.clock.now)
        return self.ended.get(machine.id)

    def machine_s(self, head: Head, since: float, until: float) -> float:
        """Seconds of machines that were up between two moments."""
        return sum(seconds for _, seconds in self._paid_s(head, since, until))

    def _paid_s(self, head: Head, since: float, until: float) -> Iterator[tuple[Machine, float]]:
        for machine in head.world.machines.values():
            end = self._end_of(machine)
            end = until if end is None else min(end, until)
            yield machine, max(end - max(machine.booted_at, since), 0.0)

    def bill(self, head: Head, until: float) -> float:
        """What the provider has billed up to a moment."""
        return self.machine_s(head, 0.0, until) * USD_PER_HOUR / 3600
