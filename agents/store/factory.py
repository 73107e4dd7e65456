"""Opens the store that an address names."""

from __future__ import annotations

import os

from agents.store.interface import Store
from agents.store.locations import Etcd, read_address
from agents.store.socket_client import SocketStore
from agents.store.sqlite_store import EmbeddedStore


async def open_store(url: str) -> Store:
    """Open the store at an address; ``InputError`` lists all that is wrong with the address.

    An embedded file is opened at once; ``StoreUnavailable`` if another process has it open. Other
    stores are connected to on first use.
    """
    address = read_address(url)
    if isinstance(address, Etcd):
        # gRPC is slow to import, and only this store needs it. Its own log lines would repeat our
        # errors.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from agents.store.etcd import open_etcd  # noqa: PLC0415 - see above

        return open_etcd(address)
    if address.kind == "embedded":
        return await EmbeddedStore.open(address.path)
    return SocketStore(address.path, timeout_s=address.timeout_s)
