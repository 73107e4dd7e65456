"""Sets an event whenever keys change; the reader then reads the store, not the changes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from agents.store.interface import Compacted, Store, StoreError

RETRY_S = 0.3


async def signal_changes(
    store: Store, prefix: str, changed: asyncio.Event, *, small: str
) -> NoReturn:
    """Set the event at each change below the prefix; ``small``: a key that is quick to read."""
    while True:
        with contextlib.suppress(StoreError):  # The reader of the store reports the outage.
            after = (await store.snapshot(small)).revision
            async with contextlib.aclosing(store.watch(prefix, after=after)) as changes:
                async for change in changes:
                    changed.set()
                    if isinstance(change, Compacted):
                        break
        await asyncio.sleep(RETRY_S)
