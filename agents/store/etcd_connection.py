"""The connection to an etcd cluster: which member to ask, and what a failure means."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from agents.daemon.credentials import check_mode
from agents.store.etcd_messages import Method, message, method
from agents.store.interface import (
    LeaseGone,
    StoreRefused,
    StoreUnavailable,
    WriteRejected,
    WriteUnknown,
)
from agents.store.locations import Etcd
from simulator.documents.problems import InputError, Problems

OPTIONS = (
    # etcd closes a connection that pings more often than every 5 s, or while no call is open.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 256 << 20),
    # Otherwise clients of the same addresses would share a connection and its failures.
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
"""Errors of a write that the member has not proposed to the cluster."""
REJECTED = ("request is too large", "message larger than max", "too many operations")
"""Errors of a write that the next attempt would meet again; the second is gRPC's own."""
STALE_TOKEN = (
    "invalid auth token",
    "revision of auth store is old",
    "revision in header is old",
    "user name is empty",
)


class EtcdMembers:
    """A channel to each member; one member is asked until it fails."""

    def __init__(self, place: Etcd) -> None:
        """Prepare the channels, which connect on first use."""
        self._place = place
        self._stamp = _stamp(place)
        self._channels = _open(place)
        self._old: list[Any] = []
        """Channels with the previous certificates, open for their streams until the next change."""
        self._at = 0
        self.token = ""
        """The authentication token, if there is a user."""
        self._entering = asyncio.Lock()
        self._last_problem = ""
        self.is_closed = False

    async def close(self) -> None:
        """Close the channels; pending calls fail."""
        self.is_closed = True
        for channel in (*self._channels, *self._old):
            await channel.close()

    async def ask(self, method: Method, request: Any, *, is_write: bool = False) -> Any:
        """Send a request and return the response, or raise a ``StoreError`` within the timeout."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._place.timeout_s
        # A silent member may not use up the timeout, unless it has received our write.
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
                raise_refusal(error, is_write=is_write)
                is_lost = is_write and not any(each in str(error.details()) for each in NOT_TAKEN)
            except asyncio.CancelledError:
                raise_own_cancellation()
                is_lost = is_write
            if is_lost:
                raise WriteUnknown(f"etcd did not answer a write: {self._last_problem}")
            await asyncio.sleep(RETRY_S)

    async def reach(self, end_s: float) -> int:
        """Return a member that answers and knows a leader, with a valid token.

        Only then is a write sent: if this fails, nothing was written.
        """
        loop = asyncio.get_running_loop()
        share_s = self._place.timeout_s / max(2, len(self._channels))
        while not self.is_closed and (left_s := end_s - loop.time()) > 0:
            await self._renew()
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

    async def _renew(self) -> None:
        """Use renewed certificates: a channel keeps those with which it was made."""
        stamp = _stamp(self._place)
        if stamp == self._stamp:
            return
        try:
            channels = _open(self._place)
        except InputError:
            return  # The files are being replaced.
        self._stamp = stamp
        old, self._old, self._channels = self._old, self._channels, channels
        for channel in old:
            await channel.close()

    async def check(self, member: int, *, limit_s: float) -> None:
        """Raise if a member does not answer or knows no leader."""
        ask = self._channels[member].unary_unary(STATUS.path, STATUS.serialize, STATUS.read)
        if not (await ask(STATUS_REQUEST(), timeout=limit_s)).leader:
            raise StoreUnavailable("it has no leader")

    def leave(self, member: int, problem: str) -> None:
        """Ask the next member from now on."""
        self._last_problem = f"{self._place.endpoints[member]}: {problem}"
        if self._at == member:
            self._at = (member + 1) % len(self._channels)

    def channel(self, member: int) -> Any:
        """Return a member's channel, for streams, whose failures the caller handles."""
        return self._channels[member]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return each call's metadata: the token; members without a leader end streams."""
        leader = (("hasleader", "true"),)
        return (*leader, ("token", self.token)) if self.token else leader

    def drop_token(self, token: str, problem: str) -> bool:
        """Return whether the error means a stale token; if so, the next call fetches another."""
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
                check_mode(file)
            except InputError as error:
                raise StoreRefused(f"the password file of etcd: {error}") from None
            except (OSError, UnicodeDecodeError) as error:
                raise StoreRefused(f"the password file of etcd cannot be read: {error}") from None
            request = AUTHENTICATE_REQUEST(name=self._place.user, password=password)
            ask = channel.unary_unary(AUTHENTICATE.path, AUTHENTICATE.serialize, AUTHENTICATE.read)
            try:
                self.token = (await ask(request, timeout=limit_s)).token
            except grpc.aio.AioRpcError as error:
                raise_refusal(error)
                raise


def raise_refusal(error: grpc.aio.AioRpcError, *, is_write: bool = False) -> None:
    """Raise ``LeaseGone``, ``WriteRejected`` or ``StoreRefused`` if etcd's answer is final."""
    text = error.details() or ""
    if "requested lease not found" in text:
        raise LeaseGone(text)
    is_denied = error.code() is grpc.StatusCode.PERMISSION_DENIED
    if is_write and (is_denied or any(each in text for each in REJECTED)):
        raise WriteRejected(f"etcd refused: {text}")
    if error.code() in REFUSALS:
        raise StoreRefused(f"etcd refused: {text}")


def raise_own_cancellation() -> None:
    """Re-raise the cancellation if this task was cancelled.

    gRPC also raises ``CancelledError`` for calls on a channel that is closed, which is no
    cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    if task.cancelling():
        raise asyncio.CancelledError


def _open(place: Etcd) -> list[Any]:
    credentials = _credentials(place)
    return [
        grpc.aio.insecure_channel(each, OPTIONS)
        if credentials is None
        else grpc.aio.secure_channel(each, credentials, OPTIONS)
        for each in place.endpoints
    ]


def _stamp(place: Etcd) -> tuple[tuple[int, int] | None, ...]:
    """Return a value that changes when a file of certificates does."""
    found: list[tuple[int, int] | None] = []
    for path in (place.ca, place.cert, place.key):
        try:
            about = None if path is None else path.stat()
            found.append(None if about is None else (about.st_mtime_ns, about.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def _credentials(place: Etcd) -> grpc.ChannelCredentials | None:
    if not place.is_encrypted:
        return None
    problems = Problems()
    read: dict[str, bytes | None] = {}
    for name, path in (("ca", place.ca), ("cert", place.cert), ("key", place.key)):
        try:
            read[name] = None if path is None else path.read_bytes()
            if path is not None and name == "key":
                check_mode(path)
        except InputError as error:
            problems.take(error, place=f"the store's {name},")
        except OSError as error:
            problems.add(f"the store's {name}", f"{path} cannot be read: {error.strerror}")
    problems.raise_if_any()
    return grpc.ssl_channel_credentials(read["ca"], read["key"], read["cert"])
