"""Who leads: one sailord at a time, for as long as it keeps a lease.

The leader stops acting before its lease can have ended, by a clock that goes on while the
machine sleeps. A daemon that starts on the same state folder has proof that its predecessor is
dead, since it holds the folder's lock; it ends that one's lease and leads at once.
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
from agents.store import CreatedAt, Put, Store, StoreError, StoreUnavailable, WriteUnknown

MARGIN_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class StateFolder:
    """A folder that is ours alone for as long as this process lives."""

    path: Path
    id: str
    """Made with the folder: no other folder on any machine has it."""
    lock: int
    """A descriptor that is never closed."""


def take_state(folder: Path) -> StateFolder:
    """Make the folder ours, or say who has it."""
    lock = lock_folder(folder, service="sailord")
    name = folder / "id"
    if not name.exists():
        replace_file(name, uuid.uuid4().hex)
    return StateFolder(folder, name.read_text(encoding="ascii"), lock)


@dataclass(eq=False)
class Election:
    """One daemon's part in it."""

    store: Store
    key: str
    state: StateFolder
    address: str
    lease_s: float
    daemon: str = field(default_factory=lambda: uuid.uuid4().hex)
    term: int | None = None
    seen: Leader | None = None
    """Who led when we last looked."""
    _lease: int = 0
    _granted_s: float = 0.0
    _sure_until: float = 0.0

    @property
    def is_sure(self) -> bool:
        """We lead, and nobody else can do so yet."""
        return self.term is not None and since_boot_s() < self._sure_until

    async def run_for_leader(self) -> bool:
        """Lead if nobody does; raises what the store raises."""
        entry = await self.store.get(self.key)
        if entry is not None:
            self.seen = _leader(entry.value)
            if self.seen is None or not self._is_dead(self.seen):
                return False
            await self.store.revoke(self.seen.lease)
        asked = since_boot_s()
        lease = await self.store.grant(self.lease_s)
        me = self._me(lease.id)
        with contextlib.suppress(WriteUnknown):  # What stands there afterwards tells.
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
        self._trust(asked)
        return True

    async def stay(self) -> None:
        """Keep leading; ``term`` is gone if that was in vain."""
        asked = since_boot_s()
        try:
            is_kept = await self.store.keep(self._lease)
        except (StoreUnavailable, WriteUnknown):
            is_kept = None
        if is_kept:
            self._trust(asked)
        elif is_kept is False or not self.is_sure:
            self.term = None

    async def resign(self) -> None:
        """Let another lead at once."""
        lease, self.term, self._lease = self._lease, None, 0
        if lease:
            with contextlib.suppress(StoreError):
                await self.store.revoke(lease)

    def _trust(self, asked: float) -> None:
        margin_s = min(MARGIN_S_MAX, self._granted_s / 5)
        self._sure_until = asked + self._granted_s - margin_s

    def _me(self, lease: int) -> Leader:
        host, state = socket.gethostname(), self.state.id
        return Leader(self.daemon, host, boot_id(), os.getpid(), state, self.address, lease)

    def _is_dead(self, leader: Leader) -> bool:
        """Its state folder's lock is ours now, so no process has it."""
        return leader.state == self.state.id


def _leader(value: bytes) -> Leader | None:
    try:
        return decode(Leader, value)
    except WireError:
        return None
