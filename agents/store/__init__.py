"""The store of the cluster's records: one interface, in etcd or embedded in sailord."""

from __future__ import annotations

from agents.store.factory import open_store
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
    Store,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    ValueIs,
    WriteUnknown,
)
from agents.store.locations import check_address, read_address
from agents.store.socket_server import serve
from agents.store.sqlite_store import EmbeddedStore

__all__ = [
    "Change",
    "Changed",
    "Compacted",
    "Compare",
    "CreatedAt",
    "Delete",
    "EmbeddedStore",
    "Entry",
    "Lease",
    "LeaseGone",
    "LeaseIs",
    "ModifiedAt",
    "Operation",
    "Outcome",
    "Put",
    "Snapshot",
    "Store",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "ValueIs",
    "WriteUnknown",
    "check_address",
    "open_store",
    "read_address",
    "serve",
]
