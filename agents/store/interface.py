"""The interface of the store: entries with revisions, transactions, leases and watches.

Each change raises the store's revision by one. Clients must not rely on seeing every change: a
snapshot gives the present state, and a watch only says when to read again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

CHANGES_MAX = 120
"""Per transaction; etcd allows 128 operations by default."""
TRANSACTION_BYTES_MAX = 1 << 20
"""Keys and values of a transaction; etcd allows 1.5 MiB by default."""


class StoreError(Exception):
    """The store has not carried out a request; the message says why."""


class StoreUnavailable(StoreError):  # noqa: N818 - names the state of the store
    """The store does not answer, and nothing was changed; a retry may succeed."""


class WriteUnknown(StoreError):  # noqa: N818 - names the state of the store
    """The write may have been applied, or may still be; only a read of the store can tell."""


class StoreRefused(StoreError):  # noqa: N818 - names the state of the store
    """The store refuses the request for good: a wrong password, a missing permission."""


class WriteRejected(StoreRefused):
    """The store will never take this write: it is too long, or its keys are not permitted."""


class LeaseGone(StoreError):  # noqa: N818 - names the state of the store
    """The lease of a write has expired; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value, and the revisions at which it was created and last modified."""

    key: str
    value: bytes
    created: int
    modified: int
    lease: int = 0
    """The lease with which the entry is deleted; 0: none."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All entries with a prefix, ordered by key, at one revision."""

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class ModifiedAt:
    """Holds if the key was last modified at this revision; 0: if it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class CreatedAt:
    """Holds if the key was created at this revision; 0: if it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Holds if the key has this value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class LeaseIs:
    """Holds if the key exists under this lease; 0: under none."""

    key: str
    lease: int


Compare = ModifiedAt | CreatedAt | ValueIs | LeaseIs


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key, under a lease or under none (0); this replaces the lease that it had."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key; a missing one is no error and no change."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a transaction was applied, and the revision then."""

    is_applied: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease: its keys are deleted if it is not renewed within ``ttl_s``."""

    id: int
    ttl_s: float
    """As granted, which may be longer than requested."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key's new entry; ``None``: it was deleted."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Changed:
    """The changes of one revision under a watched prefix, ordered by key."""

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Compacted:
    """The store has compacted changes that the watch would have to show.

    The watch ends with this; the client reads a new snapshot and watches from there.
    """

    revision: int
    """The store's present revision, as far as known."""


class Store(Protocol):
    """A client of the store; every call but ``watch`` ends within the timeout.

    All calls may raise ``StoreUnavailable`` or ``StoreRefused``.
    """

    async def get(self, key: str) -> Entry | None:
        """Read one key."""

    async def snapshot(self, prefix: str) -> Snapshot:
        """Read all keys with this prefix, at one revision."""

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Set a key and return the revision: a transaction without compares."""
        return (await self.transact((), [Put(key, value, lease)])).revision

    async def transact(self, compares: Sequence[Compare], orders: Sequence[Operation]) -> Outcome:
        """Apply all operations if all compares hold, and none otherwise, in one revision.

        Raises ``WriteUnknown`` if the result is unknown, ``LeaseGone`` if a lease has expired, and
        ``WriteRejected`` if a repetition would fail too.
        """

    async def grant(self, ttl_s: float) -> Lease:
        """Open a lease. If the answer is lost, the lease has no keys and expires."""

    async def keep(self, lease: int) -> bool:
        """Renew a lease; ``False``: it has expired, and its keys are deleted."""

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; an expired one is no error."""

    def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Changed | Compacted, None]:
        """Yield each revision above ``after`` that changes a key with this prefix, in order, once.

        Survives outages. Ends with ``Compacted``, or when the client is closed; use
        ``contextlib.aclosing``.
        """

    async def close(self) -> None:
        """Close the client; watches end. Leases stay until they are revoked or expire."""


def check_transaction(orders: Sequence[Operation]) -> None:
    """Refuse a transaction that is too large for any of the stores."""
    keys = [order.key for order in orders]
    assert len(keys) == len(set(keys)), f"a transaction changes a key twice: {keys}"
    if len(orders) > CHANGES_MAX:
        raise WriteRejected(f"a transaction of {len(orders)} changes; the limit is {CHANGES_MAX}")
    size = sum(len(order.key.encode()) for order in orders)
    size += sum(len(order.value) for order in orders if isinstance(order, Put))
    if size > TRANSACTION_BYTES_MAX:
        raise WriteRejected(f"a transaction of {size} bytes; the limit is {TRANSACTION_BYTES_MAX}")


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the first key after all keys with this prefix; ``None``: there is none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None
