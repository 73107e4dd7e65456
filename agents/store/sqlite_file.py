"""The embedded store's file: entries, leases and the latest changes, in SQLite.

Nothing here waits or reads a clock. It must be used by one thread at a time.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.store.interface import (
    Change,
    Changed,
    Compacted,
    Compare,
    CreatedAt,
    Delete,
    Entry,
    Lease,
    LeaseGone,
    LeaseIs,
    ModifiedAt,
    Operation,
    Outcome,
    Put,
    Snapshot,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    ValueIs,
    WriteUnknown,
    prefix_end,
)

APPLICATION_ID = 0x5361696C  # "Sail", in the file's header.
FORMAT = 1
HISTORY_MAX = 5_000
"""The most revisions that are kept for watches: 2,000 nodes lost and registered again fit."""
HISTORY_BYTES_MAX = 32 << 20
"""The most bytes of their keys and values: some 60 generations of 2,000 nodes.

A transaction has at most 1 MiB, so the last 32 revisions are always kept.
"""
READ_AT_ONCE = 10
"""The most revisions that a watch reads from the file at once."""
BACKUP_AHEAD = 1_000_000_000
"""More revisions than a store writes between a backup and its loss."""

SCHEMA = f"""
BEGIN;
CREATE TABLE entries (
    key BLOB PRIMARY KEY, value BLOB NOT NULL,
    created INTEGER NOT NULL, modified INTEGER NOT NULL, lease INTEGER NOT NULL
);
CREATE INDEX entries_by_lease ON entries (lease) WHERE lease <> 0;
-- What watches may still ask for; a deleted key has no value.
CREATE TABLE changes (
    revision INTEGER NOT NULL, key BLOB NOT NULL, value BLOB,
    created INTEGER, lease INTEGER, PRIMARY KEY (revision, key)
);
-- AUTOINCREMENT: the number of a deleted lease is never used again.
CREATE TABLE leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl_s REAL NOT NULL);
-- A process may still hold a lease of a file that was here before: numbers begin at a random one.
INSERT INTO leases VALUES (abs(random() >> 14), 0);
DELETE FROM leases;
CREATE TABLE head (revision INTEGER NOT NULL, compacted INTEGER NOT NULL);
INSERT INTO head VALUES (0, 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
COMMIT;
"""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Operations that are applied together if the compares hold."""

    compares: tuple[Compare, ...]
    orders: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Open a lease."""

    ttl_s: float


@dataclass(frozen=True, slots=True)
class Revoke:
    """End a lease, and delete its keys."""

    lease: int


StoreWrite = Transaction | OpenLease | Revoke
StoreAnswer = Outcome | Lease | StoreError


@dataclass(frozen=True, slots=True)
class Applied:
    """The results of a batch of writes, and the changes that watches must show."""

    answers: tuple[StoreAnswer, ...]
    changed: tuple[Changed, ...]


class SqliteFile:
    """The open file; no other process can open it meanwhile."""

    def __init__(
        self,
        path: Path,
        *,
        history_max: int = HISTORY_MAX,
        history_bytes_max: int = HISTORY_BYTES_MAX,
    ) -> None:
        self._history_max, self._history_bytes_max = history_max, history_bytes_max
        self._base = _connect(path)
        try:
            self._prepare(path)
            self._history_bytes = self._bytes_of(self.compacted + 1, self.revision)
        except sqlite3.Error as error:
            self._base.close()
            raise _describe_unusable(path, error) from None
        except StoreError:
            self._base.close()
            raise

    def _prepare(self, path: Path) -> None:
        # The lock is held until the process ends. Set before WAL, it also avoids the shared-memory
        # file beside the database.
        self._base.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._base.execute("BEGIN EXCLUSIVE")
        self._base.execute("COMMIT")
        is_new = self._number("SELECT count(*) FROM sqlite_schema") == 0
        found = self._number("PRAGMA application_id"), self._number("PRAGMA user_version")
        if not is_new and found[0] != APPLICATION_ID:
            raise StoreRefused(f"{path} is a database, but not a store of Sailor")
        if not is_new and found[1] != FORMAT:
            raise StoreRefused(f"{path} has format {found[1]}; this release reads {FORMAT}")
        self._base.execute("PRAGMA journal_mode = WAL")
        # A commit is on the disk before it is acknowledged, and so survives a power failure.
        self._base.execute("PRAGMA synchronous = FULL")
        if is_new:
            self._base.executescript(SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def _number(self, question: str, *given: int) -> int:
        (number,) = self._base.execute(question, given).fetchone()
        return int(number)

    @property
    def revision(self) -> int:
        """The present revision."""
        return self._number("SELECT revision FROM head")

    @property
    def compacted(self) -> int:
        """The revision up to which changes were deleted."""
        return self._number("SELECT compacted FROM head")

    def get(self, key: str) -> Entry | None:
        """Read one key."""
        row = self._base.execute("SELECT * FROM entries WHERE key = ?", (key.encode(),)).fetchone()
        return None if row is None else _entry(row)

    def snapshot(self, prefix: str) -> Snapshot:
        """Read all keys with this prefix."""
        first = prefix.encode()
        end = prefix_end(first)
        question = "SELECT * FROM entries WHERE key >= ? AND (? IS NULL OR key < ?) ORDER BY key"
        rows = self._base.execute(question, (first, end, end)).fetchall()
        return Snapshot(self.revision, tuple(map(_entry, rows)))

    def leases(self) -> tuple[Lease, ...]:
        """Return all leases that were neither revoked nor have expired."""
        rows = self._base.execute("SELECT id, ttl_s FROM leases ORDER BY id")
        return tuple(Lease(id_, ttl_s) for id_, ttl_s in rows)

    def changes_after(self, revision: int) -> tuple[Changed, ...] | Compacted:
        """Return the next changes after a revision, oldest first; empty: there are none yet."""
        # A revision in the future belongs to another file, which was here before.
        if not self.compacted <= revision <= self.revision:
            return Compacted(self.revision)
        changes: defaultdict[int, list[Change]] = defaultdict(list)
        question = (
            "SELECT revision, key, value, created, lease FROM changes"
            " WHERE revision BETWEEN ? AND ? ORDER BY revision, key"
        )
        rows = self._base.execute(question, (revision + 1, revision + READ_AT_ONCE))
        for at, key, value, created, lease in rows:
            entry = None if value is None else _entry((key, value, created, at, lease))
            changes[at].append(Change(key.decode(), entry))
        return tuple(Changed(at, tuple(each)) for at, each in changes.items())

    def apply(self, writes: Sequence[StoreWrite]) -> Applied:
        """Apply several writes in order, in one SQL transaction: all are stored, or none."""
        answers: list[StoreAnswer] = []
        changed: list[Changed] = []
        ready = False
        try:
            self._base.execute("BEGIN IMMEDIATE")
            before = self.revision
            for write in writes:
                answers.append(self._carry_out(write, changed))
            kept = self._forget(self._history_bytes + self._bytes_of(before + 1, self.revision))
            ready = True
            self._base.execute("COMMIT")
            self._history_bytes = kept
        except Exception as error:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            # A commit that failed may still be found after a restart.
            kind = WriteUnknown if ready else StoreUnavailable
            return Applied((kind(f"the store's file: {error}"),) * len(writes), ())
        return Applied(tuple(answers), tuple(changed))

    def _carry_out(self, write: StoreWrite, changed: list[Changed]) -> StoreAnswer:
        match write:
            case Transaction(compares, orders):
                if not all(map(self._holds, compares)):
                    return Outcome(False, self.revision)
                for order in orders:
                    if isinstance(order, Put) and order.lease and not self._has(order.lease):
                        return LeaseGone(f"{order.key}: lease {order.lease} has expired")
                return Outcome(True, self._change(orders, changed))
            case OpenLease(ttl_s):
                row = self._base.execute("INSERT INTO leases (ttl_s) VALUES (?)", (ttl_s,))
                assert row.lastrowid is not None
                return Lease(row.lastrowid, ttl_s)
            case Revoke(lease):
                question = "SELECT key FROM entries WHERE lease = ? AND lease <> 0"
                rows = self._base.execute(question, (lease,)).fetchall()
                revision = self._change([Delete(key.decode()) for (key,) in rows], changed)
                self._base.execute("DELETE FROM leases WHERE id = ?", (lease,))
                return Outcome(True, revision)

    def _holds(self, compare: Compare) -> bool:
        entry = self.get(compare.key)
        match compare:
            case ModifiedAt(revision=revision):
                return revision == (0 if entry is None else entry.modified)
            case CreatedAt(revision=revision):
                return revision == (0 if entry is None else entry.created)
            case ValueIs(value=value):
                return entry is not None and value == entry.value
            case LeaseIs(lease=lease):
                return entry is not None and lease == entry.lease

    def _has(self, lease: int) -> bool:
        return bool(self._base.execute("SELECT 1 FROM leases WHERE id = ?", (lease,)).fetchone())

    def _change(self, orders: Sequence[Operation], changed: list[Changed]) -> int:
        revision = self.revision + 1
        changes = []
        for order in sorted(orders, key=lambda each: each.key.encode()):
            entry = self.get(order.key)
            if isinstance(order, Delete):
                if entry is None:
                    continue
                self._base.execute("DELETE FROM entries WHERE key = ?", (order.key.encode(),))
                entry = None
            else:
                created = revision if entry is None else entry.created
                entry = Entry(order.key, order.value, created, revision, order.lease)
                row = (order.key.encode(), order.value, created, revision, order.lease)
                self._base.execute("REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", row)
            changes.append(Change(order.key, entry))
        if not changes:
            return revision - 1
        self._base.executemany(
            "INSERT INTO changes VALUES (?, ?, ?, ?, ?)",
            [(revision, each.key.encode(), *_rest(each.entry)) for each in changes],
        )
        self._base.execute("UPDATE head SET revision = ?", (revision,))
        changed.append(Changed(revision, tuple(changes)))
        return revision

    def _bytes_of(self, first: int, last: int) -> int:
        """Return the bytes of the keys and values that these revisions changed."""
        question = "SELECT total(length(key) + ifnull(length(value), 0)) FROM changes"
        return self._number(f"{question} WHERE revision BETWEEN ? AND ?", first, last)

    def _forget(self, held: int) -> int:
        """Delete the oldest revisions while either limit is exceeded; return the bytes left."""
        last, compacted = self.revision, self.compacted
        first = compacted + 1
        while last - compacted > self._history_max or held > self._history_bytes_max:
            compacted += 1
            held -= self._bytes_of(compacted, compacted)
        if compacted >= first:
            self._base.execute(
                "DELETE FROM changes WHERE revision BETWEEN ? AND ?", (first, compacted)
            )
            self._base.execute("UPDATE head SET compacted = ?", (compacted,))
        return held


def write_backup(path: Path, world: Snapshot) -> None:
    """Write an empty file with all entries of a store that have no lease.

    Its revision is ``BACKUP_AHEAD`` beyond the store's, and it has no history of changes: a watcher
    of the lost store finds its revision compacted, and reads everything again.
    """
    base = _connect(path)
    try:
        base.executescript(SCHEMA)
        base.execute("BEGIN")
        base.executemany(
            "INSERT INTO entries VALUES (?, ?, ?, ?, 0)",
            [
                (entry.key.encode(), entry.value, entry.created, entry.modified)
                for entry in world.entries
                if not entry.lease
            ],
        )
        revision = world.revision + BACKUP_AHEAD
        base.execute("UPDATE head SET revision = ?, compacted = ?", (revision, revision))
        base.execute("COMMIT")
    finally:
        base.close()


def _connect(path: Path) -> sqlite3.Connection:
    try:
        # Autocommit: transactions begin and end explicitly.
        return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _describe_unusable(path, error) from None


def _entry(row: tuple[bytes, bytes, int, int, int]) -> Entry:
    key, value, created, modified, lease = row
    return Entry(key.decode(), value, created, modified, lease)


def _rest(entry: Entry | None) -> tuple[bytes | None, int | None, int | None]:
    return (None, None, None) if entry is None else (entry.value, entry.created, entry.lease)


def _describe_unusable(path: Path, error: sqlite3.Error) -> StoreError:
    if error.sqlite_errorname.startswith("SQLITE_BUSY"):
        return StoreUnavailable(f"{path} is in use by another process")
    return StoreRefused(f"{path} cannot be used as the store: {error}")
