"""Leader election: the sailord that holds the lease on the leader key is the leader.

The store's thread renews the lease, so requests to the API cannot delay it; it stops when the
controller hangs. A leader stops acting before its lease can have expired, by a
clock that also runs while the machine is suspended. A daemon that restarts on the same state
folder holds that folder's lock, which proves that its predecessor is dead: it revokes the old lease
and becomes leader at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from agents.daemon.clock import boot_id, since_boot_s
from agents.daemon.state_folder import lock_folder
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import Leader
from agents.protocol.versions import own_protocol
from agents.store.interface import (
    CreatedAt,
    Put,
    Store,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    WriteUnknown,
)
from worker.atomic_file import replace_file

MARGIN_S_MAX = 2.0
HUNG_S = 10.0
"""After this time without a sign of life the controller is stuck: its lease is not renewed any
more."""


@dataclass(frozen=True, slots=True)
class StateFolder:
    """A state folder that this process has locked."""

    path: Path
    id: str
    """Globally unique, made with the folder."""
    lock: int
    """A descriptor that is never closed."""


def lock_state_folder(folder: Path) -> StateFolder:
    """Lock the state folder; ``InputError`` if another sailord holds it."""
    lock = lock_folder(folder, service="sailord")
    name = folder / "id"
    if not name.exists():
        replace_file(name, uuid.uuid4().hex)
    return StateFolder(folder, name.read_text(encoding="ascii"), lock)


@dataclass(eq=False)
class Election:
    """This daemon's part in the election.

    Coroutines run on the loop of the store; other threads read ``term``, ``seen`` and ``leads``.
    """

    store: Store
    key: str
    folder: StateFolder
    address: str
    lease_s: float
    hung_s: float = HUNG_S
    daemon_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    term: int | None = None
    """Our term; ``None`` while we are not the leader."""
    seen: Leader | None = None
    """The leader when we last read the key."""
    former: Leader | None = None
    """The leader before us, as far as we saw it."""
    refused: StoreRefused | None = None
    """Why the last renewal was refused for good."""
    _alive_s: float = field(default_factory=since_boot_s)
    _lease: int = 0
    _granted_s: float = 0.0
    _valid_until: float = 0.0

    @property
    def is_valid(self) -> bool:
        """Whether we are the leader and our lease cannot have expired yet."""
        return self.term is not None and since_boot_s() < self._valid_until

    @property
    def told(self) -> str:
        """Our election as a sentence: host, term, and what happened to the leader before."""
        me, former = self._record(self._lease), self.former
        text = f"sailord on {me.host} ({me.address}) was elected leader, term {self.term}"
        if former is None:
            return text
        if self._is_dead(former):
            return f"{text}: it began again, or its lease had ended"
        return f"{text}: the lease of the leader on {former.host} ({former.address}) ended"

    def leads(self, term: int) -> bool:
        """Whether we lead in this term, and our lease cannot have expired yet."""
        return self.term == term and self.is_valid

    def drop(self, term: int) -> None:
        """Stop leading in this term, whose lease may have expired."""
        if self.term == term:
            self.term = None

    def show_life(self) -> None:
        """Note that the controller is not stuck."""
        self._alive_s = since_boot_s()

    async def keep_renewing(self) -> None:
        """Renew the lease forever while we lead and the controller lives."""
        while True:
            if self.term is not None and since_boot_s() - self._alive_s < self.hung_s:
                await self.renew()
            await asyncio.sleep(self.lease_s / 8)

    async def campaign(self) -> bool:
        """Become the leader if there is none; raises what the store raises."""
        entry = await self.store.get(self.key)
        if entry is not None:
            self.seen = _leader(entry.value)
            if self.seen is None or not self._is_dead(self.seen):
                return False
            await self.store.revoke(self.seen.lease)
        asked = since_boot_s()
        lease = await self.store.grant(self.lease_s)
        me = self._record(lease.id)
        with contextlib.suppress(WriteUnknown):  # The read below says whether it was written.
            await self.store.transact(
                [CreatedAt(self.key, 0)], [Put(self.key, encode(me), lease.id)]
            )
        entry = await self.store.get(self.key)
        if entry is None or entry.value != encode(me):
            with contextlib.suppress(StoreError):
                await self.store.revoke(lease.id)
            return False
        self.former, self.seen = self.seen, me
        self._lease, self._granted_s = lease.id, lease.ttl_s
        self._extend(asked)
        self.term = entry.created  # Last: another thread drops a term whose lease has expired.
        return True

    async def renew(self) -> None:
        """Renew the lease; sets ``term`` to ``None`` if it has expired or may have."""
        asked, lease = since_boot_s(), self._lease
        try:
            is_kept = await self.store.keep(lease)
        except (StoreUnavailable, WriteUnknown):
            is_kept = None
        except StoreRefused as error:
            self.refused = error
            is_kept = None
        if lease != self._lease:
            return  # We resigned meanwhile.
        if is_kept:
            self._extend(asked)
        elif is_kept is False or not self.is_valid:
            self.term = None

    async def resign(self) -> None:
        """Revoke the lease, so that another sailord can be elected at once."""
        lease, self.term, self._lease = self._lease, None, 0
        if lease:
            with contextlib.suppress(StoreError):
                await self.store.revoke(lease)

    def _extend(self, asked: float) -> None:
        margin_s = min(MARGIN_S_MAX, self._granted_s / 5)
        self._valid_until = asked + self._granted_s - margin_s

    def _record(self, lease: int) -> Leader:
        host, state = socket.gethostname(), self.folder.id
        return Leader(
            self.daemon_id, host, boot_id(), os.getpid(), state, self.address, lease, own_protocol()
        )

    def _is_dead(self, leader: Leader) -> bool:
        """Whether the leader ran on our state folder, whose lock we hold now, and not on a copy."""
        return leader.state == self.folder.id and leader.address == self.address


def _leader(value: bytes) -> Leader | None:
    try:
        return decode(Leader, value)
    except WireError:
        return None
