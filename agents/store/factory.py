"""Opens the store that an address names."""

from __future__ import annotations

import os

from agents.store.interface import Store
from agents.store.locations import Etcd, read_address
from agents.store.socket_client import SocketStore
from agents.store.sqlite_store import EmbeddedStore


async def open_store(url: str) -> Store:
    """Open the store that a line names; ``InputError`` says all that is wrong with the line.

    An embedded file is opened at once, or ``StoreUnavailable`` raised if another process has it;
    the others are connected to when they are first asked something.
    """
    address = read_address(url)
    if isinstance(address, Etcd):
        # gRPC takes long to load, and most installations need none of it. What it would write on
        # its own between the lines of a log is told by errors, too.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from agents.store.etcd import open_etcd  # noqa: PLC0415 - see above

        return open_etcd(address)
    if address.kind == "embedded":
        return await EmbeddedStore.open(address.path)
    return SocketStore(address.path, timeout_s=address.timeout_s)
