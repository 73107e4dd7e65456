"""Authentication between agents and sailord: every request and every answer is signed.

All processes of a cluster share a key. A request's signature covers the cluster, the receiver's
address, the method, the path, the time, a nonce and the body; the answer's covers that nonce, the
status and its body. So neither can be forged, changed, replayed, or sent on to another receiver.

While the key is replaced its file has two lines: the first key signs, and all verify.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from agents.daemon.credentials import check_mode
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("signing")

REQUEST_HEADER = "Sailor-Signature"
REPLY_HEADER = "Sailor-Reply"
AGE_S_MAX = 60.0
"""The largest difference between two clocks, with the time in transit."""
TICKET_S = 3600.0
"""How long a ticket is valid: the state of a generation is fetched within it."""
NONCES_MAX = 200_000
KEY_BYTES_MIN = 16
KEYS_MAX = 4
LOOK_S = 1.0
"""How often the key's file is looked at."""
MAKE = "make one with: openssl rand -hex 32"
_FORM = re.compile(r"time=(\d{1,12}(?:\.\d{1,6})?), nonce=([0-9a-f]{32}), mac=([0-9a-f]{64})\Z")
_TICKET = re.compile(
    r"until=(\d{1,12}), generation=(\d{1,12}), reader=([^,\s]{1,200}), mac=([0-9a-f]{64})\Z"
)


class SignatureError(ValueError):
    """A message is not signed with the key, too old, or received before; the text says which."""


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Read the cluster's keys from a file: a line of 16 bytes or more for each."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        what = f"the cluster's key cannot be read: {error.strerror}"
        raise InputError(Problem(str(path), what, MAKE)) from None
    check_mode(path)
    keys = tuple(key for line in lines if (key := line.strip())) or (b"",)
    for number, key in enumerate(keys, start=1):
        if len(key) < KEY_BYTES_MIN:
            which = "the cluster's key" if len(keys) == 1 else f"line {number}"
            what = f"{which} has {len(key)} bytes; it needs {KEY_BYTES_MIN}"
            raise InputError(Problem(str(path), what, MAKE))
    if len(keys) > KEYS_MAX:
        what = f"has {len(keys)} keys"
        raise InputError(Problem(str(path), what, "keep the present one and its successor"))
    return keys


@dataclass(eq=False)
class ClusterKey:
    """A cluster's name and its keys, read again when their file changes."""

    cluster: str
    keys: tuple[bytes, ...]
    """The first signs; all verify."""
    path: Path | None = None
    _looked_s: float = 0.0
    _stamp: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path, cluster: str) -> ClusterKey:
        """Read the keys; ``InputError`` if they cannot be used."""
        return cls(cluster, read_keys(path), path, time.monotonic(), _stamp(path))

    def present(self) -> tuple[bytes, ...]:
        """Return the keys as the file has them now; one that cannot be used changes nothing."""
        now = time.monotonic()
        if self.path is not None and now >= self._looked_s + LOOK_S:
            self._looked_s, stamp = now, _stamp(self.path)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self.keys = read_keys(self.path)
                    log.info("the cluster's key was read again", keys=len(self.keys))
                except InputError as error:
                    log.warning("the cluster's key stays as it was", error=str(error))
        return self.keys

    def mac(self, *parts: str | bytes) -> str:
        """Sign with the first key."""
        return _mac(self.present()[0], self.cluster, *parts)

    def is_mac(self, shown: str, *parts: str | bytes) -> bool:
        """Return whether any key made this signature."""
        found = shown.encode("utf-8", "replace")
        return any(
            hmac.compare_digest(_mac(key, self.cluster, *parts).encode(), found)
            for key in self.present()
        )


def sign_request(
    key: ClusterKey, receiver: str, method: str, path: str, body: bytes, *, at: float
) -> tuple[str, str]:
    """Return the header's value, and the nonce with which the answer is checked.

    ``receiver`` is the address that is called; ``path`` is the path with the query.
    """
    moment, nonce = f"{at:.3f}", secrets.token_hex(16)
    mac = key.mac("request", receiver, method.upper(), path, moment, nonce, body)
    return f"time={moment}, nonce={nonce}, mac={mac}", nonce


def sign_reply(key: ClusterKey, nonce: str, status: int, body: bytes) -> str:
    """Return the header's value for the answer to the request with this nonce."""
    return key.mac("reply", nonce, str(status), body)


def ticket(key: ClusterKey, job: str, generation: int, reader: str, *, at: float) -> str:
    """Return the ticket with which workers of a node prove to agents before there were grants that
    they may read a job's snapshots."""
    about = str(int(at + TICKET_S)), str(generation), reader
    mac = key.mac("ticket", job, *about)
    return "until={}, generation={}, reader={}, mac={}".format(*about, mac)


def check_ticket(key: ClusterKey, job: str, shown: str | None, *, at: float) -> str:
    """Return the reader's name; raise ``SignatureError`` unless the ticket is valid for the job."""
    form = _TICKET.match(shown or "")
    if form is None:
        raise SignatureError("the ticket is missing or malformed")
    until, generation, reader, mac = form.groups()
    if not key.is_mac(mac, "ticket", job, until, generation, reader):
        raise SignatureError("the ticket is not for this job")
    if at > int(until) + AGE_S_MAX:
        raise SignatureError("the ticket has expired")
    return reader


def check_reply(key: ClusterKey, nonce: str, status: int, body: bytes, header: str | None) -> None:
    """Raise ``SignatureError`` unless this is a signed answer to our request."""
    if header is None or not key.is_mac(header, "reply", nonce, str(status), body):
        raise SignatureError("the answer is not signed with the cluster's key")


@dataclass(slots=True)
class Verifier:
    """Checks requests to one receiver, and remembers their nonces."""

    key: ClusterKey
    receiver: Callable[[], str]
    """The address that others know it by."""
    started_s: float | None = None
    """When this process started, by ``clock_s``; it knows no nonce from before."""
    clock_s: Callable[[], float] = time.monotonic
    """Unlike the clock of messages, this one is never set."""
    _seen: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def check_header(self, header: str | None, *, at: float) -> tuple[str, str, str]:
        """Check a header before the body is read; raises ``SignatureError``.

        Returns the header's time, nonce and signature.
        """
        form = _FORM.match(header or "")
        if form is None:
            raise SignatureError(f"the header {REQUEST_HEADER} is missing or malformed")
        moment, nonce, mac = form.groups()
        if abs(at - float(moment)) > AGE_S_MAX:
            raise SignatureError("the request is too old, or a clock is wrong")
        age_s = float("inf") if self.started_s is None else self.clock_s() - self.started_s
        if float(moment) + 0.001 < at - age_s:
            raise SignatureError("the request is older than this process, or a clock is wrong")
        if nonce in self._seen:
            raise SignatureError("the request was received before")
        return moment, nonce, mac

    def check_request(
        self, method: str, path: str, body: bytes, header: str | None, *, at: float
    ) -> str:
        """Return the request's nonce; raises ``SignatureError`` if the request is not valid."""
        # Forget old nonces; the sender's clock may be ahead by as much as it may be late.
        now_s = self.clock_s()
        while self._seen and next(iter(self._seen.values())) < now_s - 2 * AGE_S_MAX:
            self._seen.popitem(last=False)
        moment, nonce, mac = self.check_header(header, at=at)
        about = (self.receiver(), method.upper(), path, moment, nonce, body)
        if not self.key.is_mac(mac, "request", *about):
            what = "the request is not signed with the cluster's key, or not for"
            raise SignatureError(f"{what} {self.receiver()}")
        if len(self._seen) >= NONCES_MAX:
            raise SignatureError("too many requests in a short time")
        self._seen[nonce] = now_s
        return nonce


def _mac(key: bytes, *parts: str | bytes) -> str:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        mac.update(len(data).to_bytes(8, "big") + data)
    return mac.hexdigest()


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_mtime_ns, about.st_size, about.st_ino, about.st_mode
