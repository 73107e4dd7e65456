"""What outlives every process: one small interface, kept in etcd or in a file of sailord's own."""

from __future__ import annotations

from agents.store.address import check_address, open_store, read_address
from agents.store.embedded import EmbeddedStore
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
    Order,
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
from agents.store.server import serve

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
    "Order",
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
