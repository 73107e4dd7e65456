"""The store in etcd, over the API of version 3."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
import grpc.aio

from agents.store.etcd_connection import RETRY_S, EtcdMembers, raise_own_cancellation, raise_refusal
from agents.store.etcd_messages import message, method
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
    StoreRefused,
    StoreUnavailable,
    ValueIs,
    check_transaction,
    prefix_end,
)
from agents.store.locations import Etcd

RANGE, RANGE_REQUEST = method("KV", "Range"), message("RangeRequest")
TXN, TXN_REQUEST = method("KV", "Txn"), message("TxnRequest")
COMPARE, REQUEST_OP = message("Compare"), message("RequestOp")
PUT_REQUEST, DELETE_REQUEST = message("PutRequest"), message("DeleteRangeRequest")
GRANT, GRANT_REQUEST = method("Lease", "LeaseGrant"), message("LeaseGrantRequest")
REVOKE, REVOKE_REQUEST = method("Lease", "LeaseRevoke"), message("LeaseRevokeRequest")
KEEP, KEEP_REQUEST = method("Lease", "LeaseKeepAlive"), message("LeaseKeepAliveRequest")
WATCH, WATCH_REQUEST = method("Watch", "Watch"), message("WatchRequest")
WATCH_CREATE_REQUEST = message("WatchCreateRequest")

EVERYTHING = b"\0"
"""As a key: the first possible one. As an end: no end."""
DELETED = 1
"""The type of a deletion event."""


def open_etcd(place: Etcd) -> EtcdStore:
    """Return a client of a cluster; ``InputError`` if a certificate cannot be read."""
    return EtcdStore(EtcdMembers(place), timeout_s=place.timeout_s)


class EtcdStore(Store):
    """A client of an etcd cluster."""

    def __init__(self, members: EtcdMembers, *, timeout_s: float) -> None:
        """Use these members; call ``open_etcd`` instead."""
        self._members, self._timeout_s = members, timeout_s

    async def close(self) -> None:
        """Close the connections; watches end."""
        await self._members.close()

    async def get(self, key: str) -> Entry | None:
        response = await self._members.ask(RANGE, RANGE_REQUEST(key=key.encode()))
        return _entry(response.kvs[0]) if response.kvs else None

    async def snapshot(self, prefix: str) -> Snapshot:
        key, range_end = _range(prefix)
        response = await self._members.ask(RANGE, RANGE_REQUEST(key=key, range_end=range_end))
        return Snapshot(response.header.revision, tuple(map(_entry, response.kvs)))

    async def transact(self, compares: Sequence[Compare], orders: Sequence[Operation]) -> Outcome:
        check_transaction(orders)
        request = TXN_REQUEST(
            compare=[each for compare in compares for each in _compares(compare)],
            success=[_operation(order) for order in orders],
        )
        response = await self._members.ask(TXN, request, is_write=True)
        return Outcome(response.succeeded, response.header.revision)

    async def grant(self, ttl_s: float) -> Lease:
        """Open a lease; etcd rounds up to seconds, and has a minimum of its own."""
        if not 0 < ttl_s < 1e9:
            raise StoreRefused(f"a lease of {ttl_s} s is not possible")
        granted = await self._members.ask(GRANT, GRANT_REQUEST(TTL=math.ceil(ttl_s)))
        return Lease(granted.ID, float(granted.TTL))

    async def keep(self, lease: int) -> bool:
        end_s = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            member = await self._members.reach(end_s)
            stream = self._stream(member, KEEP)
            token = self._members.token
            try:
                async with asyncio.timeout(self._timeout_s / 2):
                    await stream.write(KEEP_REQUEST(ID=lease))
                    response = await stream.read()
                if response is not grpc.aio.EOF:
                    return bool(response.TTL > 0)
                problem = "it closed the stream"
            except grpc.aio.AioRpcError as error:
                problem = error.details() or str(error.code())
                if self._members.drop_token(token, problem):
                    continue
                raise_refusal(error)
            except TimeoutError:
                problem = "it did not answer"
            except asyncio.CancelledError:
                raise_own_cancellation()
                problem = "the store is closed"
            finally:
                stream.cancel()
            self._members.leave(member, problem)
            await asyncio.sleep(RETRY_S)

    async def revoke(self, lease: int) -> None:
        try:
            await self._members.ask(REVOKE, REVOKE_REQUEST(ID=lease))
        except LeaseGone:
            return

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Changed | Compacted, None]:
        while not self._members.is_closed:
            try:
                end_s = asyncio.get_running_loop().time() + self._timeout_s
                member = await self._members.reach(end_s)
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            stream = self._stream(member, WATCH)
            token = self._members.token
            problem = "it closed the stream"
            try:
                await stream.write(_watch_request(prefix, after))
                while (response := await self._next(member, stream)) is not grpc.aio.EOF:
                    if response.compact_revision:
                        yield Compacted(response.header.revision)
                        return
                    if response.canceled:
                        problem = response.cancel_reason
                        break
                    if response.created and response.header.revision < after:
                        # This member may lag; the cluster's revision decides.
                        revision = (await self.snapshot(prefix)).revision
                        if revision < after:
                            yield Compacted(revision)
                            return
                    for changed in _group_events(response.events):
                        after = changed.revision
                        yield changed
                    # Progress: nothing changed up to here. With changes there may be more to come.
                    if not response.created and not response.events:
                        after = max(after, response.header.revision)
            except grpc.aio.AioRpcError as error:
                problem = error.details() or str(error.code())
            except StoreUnavailable as error:
                problem = str(error)
            except asyncio.CancelledError:
                raise_own_cancellation()
            finally:
                stream.cancel()
            if "permission denied" in problem:
                raise StoreRefused(f"etcd denied a watch of {prefix}: {problem}")
            if not self._members.drop_token(token, problem):
                self._members.leave(member, problem)
            await asyncio.sleep(RETRY_S)

    async def _next(self, member: int, stream: Any) -> Any:
        """Wait for the next response; meanwhile check regularly that the member still answers.

        A connection to a silent machine looks healthy for minutes.
        """
        reading = asyncio.ensure_future(stream.read())
        try:
            while not (await asyncio.wait([reading], timeout=self._timeout_s))[0]:
                await self._members.check(member, limit_s=self._timeout_s)
            return reading.result()
        finally:
            reading.cancel()

    def _stream(self, member: int, method: Any) -> Any:
        channel = self._members.channel(member)
        call = channel.stream_stream(method.path, method.serialize, method.read)
        return call(metadata=self._members.metadata())


def _range(prefix: str) -> tuple[bytes, bytes]:
    key = prefix.encode()
    return key or EVERYTHING, prefix_end(key) or EVERYTHING


def _watch_request(prefix: str, after: int) -> Any:
    key, range_end = _range(prefix)
    return WATCH_REQUEST(
        create_request=WATCH_CREATE_REQUEST(
            key=key, range_end=range_end, start_revision=after + 1, progress_notify=True
        )
    )


def _entry(kv: Any) -> Entry:
    return Entry(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _group_events(events: Any) -> list[Changed]:
    """Group events by revision; a response may hold several revisions, each complete."""
    found: dict[int, list[Change]] = {}
    for event in events:
        entry = None if event.type == DELETED else _entry(event.kv)
        change = Change(event.kv.key.decode(), entry)
        found.setdefault(event.kv.mod_revision, []).append(change)
    return [
        Changed(revision, tuple(sorted(each, key=lambda change: change.key.encode())))
        for revision, each in found.items()
    ]


def _compares(compare: Compare) -> list[Any]:
    key = compare.key.encode()
    match compare:
        case ModifiedAt(revision=revision):
            return [_compare_equal(key, "MOD", mod_revision=revision)]
        case CreatedAt(revision=revision):
            return [_compare_equal(key, "CREATE", create_revision=revision)]
        case ValueIs(value=value):
            return [_compare_equal(key, "VALUE", value=value)]
        case LeaseIs(lease=lease):
            # etcd compares the lease of a missing key as 0.
            there = COMPARE(key=key, result="GREATER", target="CREATE", create_revision=0)
            return [there, _compare_equal(key, "LEASE", lease=lease)]


def _compare_equal(key: bytes, target: str, **what: Any) -> Any:
    return COMPARE(key=key, result="EQUAL", target=target, **what)


def _operation(order: Operation) -> Any:
    key = order.key.encode()
    match order:
        case Put(value=value, lease=lease):
            return REQUEST_OP(request_put=PUT_REQUEST(key=key, value=value, lease=lease))
        case Delete():
            return REQUEST_OP(request_delete_range=DELETE_REQUEST(key=key))
