"""Leader election: the sailord that holds the lease on the leader key is the leader.

A leader stops acting before its lease can have expired, by a clock that also runs while the
machine is suspended. A daemon that restarts on the same state folder holds that folder's lock,
which proves that its predecessor is dead: it revokes the old lease and becomes leader at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from agents.daemon.atomic_file import replace_file
from agents.daemon.clock import boot_id, since_boot_s
from agents.daemon.state_folder import lock_folder
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import Leader
from agents.protocol.versions import own_protocol
from agents.store.interface import CreatedAt, Put, Store, StoreError, StoreUnavailable, WriteUnknown

MARGIN_S_MAX = 2.0


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
    """This daemon's part in the election."""

    store: Store
    key: str
    state: StateFolder
    address: str
    lease_s: float
    daemon: str = field(default_factory=lambda: uuid.uuid4().hex)
    term: int | None = None
    """Our term; ``None`` while we are not the leader."""
    seen: Leader | None = None
    """The leader when we last read the key."""
    _lease: int = 0
    _granted_s: float = 0.0
    _valid_until: float = 0.0

    @property
    def is_valid(self) -> bool:
        """Whether we are the leader and our lease cannot have expired yet."""
        return self.term is not None and since_boot_s() < self._valid_until

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
        self.seen, self.term = me, entry.created
        self._lease, self._granted_s = lease.id, lease.ttl_s
        self._extend(asked)
        return True

    async def renew(self) -> None:
        """Renew the lease; sets ``term`` to ``None`` if it has expired or may have."""
        asked = since_boot_s()
        try:
            is_kept = await self.store.keep(self._lease)
        except (StoreUnavailable, WriteUnknown):
            is_kept = None
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
        host, state = socket.gethostname(), self.state.id
        return Leader(
            self.daemon, host, boot_id(), os.getpid(), state, self.address, lease, own_protocol()
        )

    def _is_dead(self, leader: Leader) -> bool:
        """Whether the leader ran on our state folder, whose lock we hold now."""
        return leader.state == self.state.id


def _leader(value: bytes) -> Leader | None:
    try:
        return decode(Leader, value)
    except WireError:
        return None
