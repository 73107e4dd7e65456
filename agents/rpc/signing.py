"""Authentication between agents and sailord: every request and every answer is signed.

All processes of a cluster share one key. A request's signature covers the method, the path, the
time, a nonce and the body; the answer's covers that nonce, the status and its body. So neither can
be forged, changed or replayed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from simulator.documents.problems import InputError, Problem

REQUEST_HEADER = "Sailor-Signature"
REPLY_HEADER = "Sailor-Reply"
TICKET_HEADER = "Sailor-Ticket"
AGE_S_MAX = 60.0
"""The largest difference between two clocks, with the time in transit."""
NONCES_MAX = 200_000
KEY_BYTES_MIN = 16
_FORM = re.compile(r"time=(\d{1,12}(?:\.\d{1,6})?), nonce=([0-9a-f]{32}), mac=([0-9a-f]{64})\Z")


class SignatureError(ValueError):
    """A message is not signed with the key, too old, or received before; the text says which."""


def read_key(path: Path) -> bytes:
    """Read the cluster's key from a file: any text of 16 bytes or more, without the end of line."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        what = f"the cluster's key cannot be read: {error.strerror}"
        raise InputError(Problem(str(path), what, "make one with: openssl rand -hex 32")) from None
    if len(key) < KEY_BYTES_MIN:
        what = f"the cluster's key has {len(key)} bytes; it needs {KEY_BYTES_MIN}"
        raise InputError(Problem(str(path), what, "make one with: openssl rand -hex 32"))
    return key


def sign_request(key: bytes, method: str, path: str, body: bytes, *, at: float) -> tuple[str, str]:
    """Return the header's value, and the nonce with which the answer is checked.

    ``path`` is the path with the query.
    """
    moment, nonce = f"{at:.3f}", secrets.token_hex(16)
    mac = _mac(key, "request", method.upper(), path, moment, nonce, body)
    return f"time={moment}, nonce={nonce}, mac={mac}", nonce


def sign_reply(key: bytes, nonce: str, status: int, body: bytes) -> str:
    """Return the header's value for the answer to the request with this nonce."""
    return _mac(key, "reply", nonce, str(status), body)


def ticket(key: bytes, job: str) -> str:
    """Return the ticket with which a job's workers read its snapshots from other agents."""
    return _mac(key, "ticket", job)


def is_ticket(key: bytes, job: str, shown: str | None) -> bool:
    """Return whether ``shown`` is the job's ticket."""
    return shown is not None and hmac.compare_digest(
        ticket(key, job).encode(), shown.encode("utf-8", "replace")
    )


def check_reply(key: bytes, nonce: str, status: int, body: bytes, header: str | None) -> None:
    """Raise ``SignatureError`` unless this is a signed answer to our request."""
    if header is None or not hmac.compare_digest(
        sign_reply(key, nonce, status, body).encode(), header.encode("utf-8", "replace")
    ):
        raise SignatureError("the answer is not signed with the cluster's key")


@dataclass(slots=True)
class Verifier:
    """Checks requests, and remembers their nonces."""

    key: bytes
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
        if nonce in self._seen:
            raise SignatureError("the request was received before")
        return moment, nonce, mac

    def check_request(
        self, method: str, path: str, body: bytes, header: str | None, *, at: float
    ) -> str:
        """Return the request's nonce; raises ``SignatureError`` if the request is not valid."""
        # Forget old nonces; the sender's clock may be ahead by as much as it may be late.
        while self._seen and next(iter(self._seen.values())) < at - 2 * AGE_S_MAX:
            self._seen.popitem(last=False)
        moment, nonce, mac = self.check_header(header, at=at)
        expected = _mac(self.key, "request", method.upper(), path, moment, nonce, body)
        if not hmac.compare_digest(expected, mac):
            raise SignatureError("the request is not signed with the cluster's key")
        if len(self._seen) >= NONCES_MAX:
            raise SignatureError("too many requests in a short time")
        self._seen[nonce] = at
        return nonce


def _mac(key: bytes, *parts: str | bytes) -> str:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        mac.update(len(data).to_bytes(8, "big") + data)
    return mac.hexdigest()
