"""The store as everybody sees it: entries with revisions, transactions, leases, watches.

Whatever changes the store raises its revision by one. Nobody depends on seeing every change: a
snapshot says what is, and a watch only says that it is time to look.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

CHANGES_MAX = 120
"""In one transaction; etcd allows 128 operations unless told otherwise."""
TRANSACTION_BYTES_MAX = 1 << 20
"""Keys and values of one transaction; etcd allows 1.5 MiB unless told otherwise."""


class StoreError(Exception):
    """The store did not do what it was asked; the message says what happened."""


class StoreUnavailable(StoreError):  # noqa: N818 - says how the store stands
    """The store cannot be reached, and nothing was changed; another time it may answer."""


class WriteUnknown(StoreError):  # noqa: N818 - says how the store stands
    """The write may have been applied, or not, or may yet be: only the store itself can tell."""


class StoreRefused(StoreError):  # noqa: N818 - says how the store stands
    """The store will not do this however often it is asked: a wrong password, no permission."""


class LeaseGone(StoreError):  # noqa: N818 - says how the store stands
    """A key was to be put under a lease that has run out; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key's value, and the revisions at which it was created and last modified."""

    key: str
    value: bytes
    created: int
    modified: int
    lease: int = 0
    """The lease with which the entry goes; 0: it stays."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All entries below a prefix, ordered by key, as they were at one revision."""

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class ModifiedAt:
    """Holds if the key was last modified at this revision; 0: if there is no such key."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class CreatedAt:
    """Holds if the key was created at this revision; 0: if there is no such key."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Holds if the key is there with just this value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class LeaseIs:
    """Holds if the key is there, under this lease (0: under none)."""

    key: str
    lease: int


Compare = ModifiedAt | CreatedAt | ValueIs | LeaseIs


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key, under a lease or (0) to stay; what lease it had before counts no more."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; none there is no mistake and no change."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a transaction's compares held, so that it was applied, and the revision then."""

    is_applied: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Keys put under it are deleted when it is not kept alive for ``ttl_s``."""

    id: int
    ttl_s: float
    """As granted; a store may give a longer one than was asked for."""


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one key: its new entry, or nothing where it was deleted."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Changed:
    """One revision's changes below the watched prefix, ordered by key."""

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Compacted:
    """The store no longer knows the changes that the watch would have to show.

    The watch ends with it; whoever watched takes a new snapshot and watches from there.
    """

    revision: int
    """The store's own now, as far as is known."""


class Store(Protocol):
    """One way to the store; every call ends within its deadline, a watch excepted.

    All may raise ``StoreUnavailable`` or ``StoreRefused``.
    """

    async def get(self, key: str) -> Entry | None:
        """Read one key."""
        ...

    async def snapshot(self, prefix: str) -> Snapshot:
        """Read all keys that begin so, at one revision."""
        ...

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Set a key whatever was there, and return the revision: ``transact`` without compares."""
        ...

    async def transact(self, compares: Sequence[Compare], orders: Sequence[Operation]) -> Outcome:
        """Carry out all orders if all compares hold, and none otherwise, in one revision.

        ``WriteUnknown`` if it cannot be told; ``LeaseGone`` if a lease that is named is gone.
        """
        ...

    async def grant(self, ttl_s: float) -> Lease:
        """Open a lease. One whose grant was not heard of holds no key, and runs out."""
        ...

    async def keep(self, lease: int) -> bool:
        """Give a lease its full time again; ``False``: it is gone, with its keys."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; one that is gone already is no mistake."""
        ...

    def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Changed | Compacted, None]:
        """Yield each revision above ``after`` that changes a key which begins so, in order, once.

        It goes on over outages. It ends with ``Compacted``, or when this way to the store is
        closed; close it with ``contextlib.aclosing``.
        """
        ...

    async def close(self) -> None:
        """Give everything back; watches end. Leases stay: they run out, or are revoked before."""
        ...


def check_transaction(orders: Sequence[Operation]) -> None:
    """Refuse what one of the stores could not take, in the same words for all of them."""
    keys = [order.key for order in orders]
    assert len(keys) == len(set(keys)), f"a transaction changes a key twice: {keys}"
    if len(orders) > CHANGES_MAX:
        raise StoreRefused(f"{len(orders)} changes at once; a transaction takes {CHANGES_MAX}")
    size = sum(len(order.key.encode()) for order in orders)
    size += sum(len(order.value) for order in orders if isinstance(order, Put))
    if size > TRANSACTION_BYTES_MAX:
        raise StoreRefused(f"{size} bytes at once; a transaction takes {TRANSACTION_BYTES_MAX}")


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key behind all those that begin so; ``None``: there is no such key."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None
