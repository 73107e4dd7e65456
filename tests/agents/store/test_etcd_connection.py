"""Channels to etcd are replaced when certificates are renewed."""

from __future__ import annotations

import asyncio
import contextlib

from agents.store.etcd_connection import EtcdMembers
from agents.store.locations import Etcd


class Closing:
    """A channel whose close takes until it is cancelled."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    async def close(self) -> None:
        self.is_asked.set()
        await asyncio.Event().wait()


async def test_new_channels_are_used_though_closing_the_oldest_is_broken_off():
    members = EtcdMembers(Etcd(("127.0.0.1:1",)))
    before, oldest = members._channels, Closing()
    members._old, members._stamp = [oldest], ()
    renewing = asyncio.create_task(members._renew())
    await oldest.is_asked.wait()
    renewing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await renewing
    assert members._channels is not before
    assert members._old == before
    await members.close()
