"""The members of an etcd cluster: which of them to ask, for how long, and what a failure means."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from agents.store.etcd_messages import Method, message, method
from agents.store.interface import (
    LeaseGone,
    StoreRefused,
    StoreUnavailable,
    WriteUnknown,
)
from agents.store.locations import Etcd
from simulator.documents.problems import Problems

OPTIONS = (
    # etcd hangs up on those who ping more often than every 5 s, or with nothing to wait for.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 256 << 20),
    # Members that name the same addresses would otherwise share a connection and its troubles.
    ("grpc.use_local_subchannel_pool", 1),
)
RETRY_S = 0.05
STATUS, STATUS_REQUEST = method("Maintenance", "Status"), message("StatusRequest")
AUTHENTICATE = method("Auth", "Authenticate")
AUTHENTICATE_REQUEST = message("AuthenticateRequest")

REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
)
NOT_TAKEN = ("etcdserver: no leader", "etcdserver: too many requests", "database space exceeded")
"""What a member says of a write that it did not even propose to the others."""
STALE_TOKEN = (
    "invalid auth token",
    "revision of auth store is old",
    "revision in header is old",
    "user name is empty",
)


class EtcdMembers:
    """One channel to each member; one of them is asked until it fails."""

    def __init__(self, place: Etcd) -> None:
        """Prepare the channels; they connect when they are first used."""
        credentials = _credentials(place)
        self._place = place
        self._channels = [
            grpc.aio.insecure_channel(each, OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(each, credentials, OPTIONS)
            for each in place.endpoints
        ]
        self._at = 0
        self.token = ""
        """What says that we were let in, where there is a user."""
        self._entering = asyncio.Lock()
        self._last_problem = ""
        self.is_closed = False

    async def close(self) -> None:
        """Hang up; whoever still waits is told so."""
        self.is_closed = True
        for channel in self._channels:
            await channel.close()

    async def ask(self, method: Method, request: Any, *, is_write: bool = False) -> Any:
        """Return the response, or raise one of the store's errors before the time is up."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._place.timeout_s
        # One member that is silent must not use up all of the time, unless it has our write.
        share_s = self._place.timeout_s / max(2, len(self._channels))
        while True:
            member = await self.reach(end_s)
            left_s = end_s - loop.time()
            token = self.token
            try:
                call = self._channels[member].unary_unary(
                    method.path, method.serialize, method.read
                )
                limit_s = left_s if is_write else min(left_s, share_s)
                return await call(request, timeout=limit_s, metadata=self.metadata())
            except grpc.aio.AioRpcError as error:
                if self.drop_token(token, error.details() or ""):
                    continue
                self.leave(member, str(error.details()))
                raise_refusal(error)
                is_lost = is_write and not any(each in str(error.details()) for each in NOT_TAKEN)
            except asyncio.CancelledError:
                raise_own_cancellation()
                is_lost = is_write
            if is_lost:
                raise WriteUnknown(f"etcd did not answer a write: {self._last_problem}")
            await asyncio.sleep(RETRY_S)

    async def reach(self, end_s: float) -> int:
        """Find a member that answers and knows a leader, and be let in; or say that none is there.

        After this a write may be sent, and not before: of what was never sent, the fate is known.
        """
        loop = asyncio.get_running_loop()
        share_s = self._place.timeout_s / max(2, len(self._channels))
        while not self.is_closed and (left_s := end_s - loop.time()) > 0:
            member = self._at
            channel = self._channels[member]
            try:
                if channel.get_state() is not grpc.ChannelConnectivity.READY:
                    await self.check(member, limit_s=min(left_s, share_s))
                if self._place.user and not self.token:
                    await self._enter(channel, min(left_s, share_s))
                return member
            except grpc.aio.AioRpcError as error:
                self.leave(member, str(error.details()))
            except StoreUnavailable as error:
                self.leave(member, str(error))
            except asyncio.CancelledError:
                raise_own_cancellation()
            await asyncio.sleep(RETRY_S)
        if self.is_closed:
            raise StoreUnavailable("the store is closed")
        raise StoreUnavailable(
            f"no member of etcd answered within {self._place.timeout_s:g} s; "
            f"the last problem: {self._last_problem or 'silence'}"
        )

    async def check(self, member: int, *, limit_s: float) -> None:
        """Raise if a member does not answer, or answers that it knows no leader."""
        ask = self._channels[member].unary_unary(STATUS.path, STATUS.serialize, STATUS.read)
        if not (await ask(STATUS_REQUEST(), timeout=limit_s)).leader:
            raise StoreUnavailable("it knows no leader")

    def leave(self, member: int, problem: str) -> None:
        """Ask another member from now on, unless that was decided already."""
        self._last_problem = f"{self._place.endpoints[member]}: {problem}"
        if self._at == member:
            self._at = (member + 1) % len(self._channels)

    def channel(self, member: int) -> Any:
        """For streams, whose failures are the caller's."""
        return self._channels[member]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call: that we were let in, and that a member without a leader
        is to end streams rather than be silent on them."""
        leader = (("hasleader", "true"),)
        return (*leader, ("token", self.token)) if self.token else leader

    def drop_token(self, token: str, problem: str) -> bool:
        """Whether etcd's complaint is about this token; if so another is fetched next."""
        is_stale = bool(token) and any(each in problem for each in STALE_TOKEN)
        if is_stale and self.token == token:
            self.token = ""
        return is_stale

    async def _enter(self, channel: Any, limit_s: float) -> None:
        async with self._entering:
            if self.token:
                return
            file = self._place.password_file
            assert file is not None, "the address was read with a user and no password"
            try:
                password = file.read_text(encoding="utf-8").removesuffix("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise StoreRefused(f"the password of etcd cannot be read: {error}") from None
            request = AUTHENTICATE_REQUEST(name=self._place.user, password=password)
            ask = channel.unary_unary(AUTHENTICATE.path, AUTHENTICATE.serialize, AUTHENTICATE.read)
            try:
                self.token = (await ask(request, timeout=limit_s)).token
            except grpc.aio.AioRpcError as error:
                raise_refusal(error)
                raise


def raise_refusal(error: grpc.aio.AioRpcError) -> None:
    """Raise what etcd said for certain, if it did."""
    text = error.details() or ""
    if "requested lease not found" in text:
        raise LeaseGone(text)
    if error.code() in REFUSALS:
        raise StoreRefused(f"etcd refused: {text}")


def raise_own_cancellation() -> None:
    """Go on with a cancellation that somebody asked of this task.

    gRPC also says so to those who wait on a channel that is closed; that is no cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    if task.cancelling():
        raise asyncio.CancelledError


def _credentials(place: Etcd) -> grpc.ChannelCredentials | None:
    if not place.is_encrypted:
        return None
    problems = Problems()
    read: dict[str, bytes | None] = {}
    for name, path in (("ca", place.ca), ("cert", place.cert), ("key", place.key)):
        try:
            read[name] = None if path is None else path.read_bytes()
        except OSError as error:
            problems.add(f"the store's {name}", f"{path} cannot be read: {error.strerror}")
    problems.raise_if_any()
    return grpc.ssl_channel_credentials(read["ca"], read["key"], read["cert"])
