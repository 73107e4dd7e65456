"""Proves to agents of other nodes that this worker may read a job's snapshots.

The agent of its node grants it: the grant names a public key, and the worker gets the secret of it
beside the grant. It signs each request for one agent and one range of one file, so that whoever
sees a request can read nothing with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

TICKET_HEADER = "Sailor-Ticket"
GRANT_HEADER = "Sailor-Grant"
PROOF_HEADER = "Sailor-Proof"


@dataclass(eq=False)
class Reader:
    """What a worker reads with."""

    ticket: str
    """What agents of versions without grants ask for."""
    grant: str = ""
    """Empty: the version of this node's agent has no grants."""
    secret: str = ""
    """The secret of the grant's key, in hexadecimal digits."""

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Reader:
        """Read what the agent gave; what a newer one adds is passed over."""
        said = spec.get("reader", {})
        return cls(spec["ticket"], said.get("grant", ""), said.get("secret", ""))

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.secret))

    def headers(self, receiver: str, path: str, span: str, *, at: float) -> dict[str, str]:
        """Return the headers that prove a request for a range of a file."""
        shown = {TICKET_HEADER: self.ticket}
        if self.grant:
            moment = f"{at:.3f}"
            signature = self._key.sign(request_text(receiver, path, span, moment)).hex()
            proof = f"time={moment}, signature={signature}"
            shown |= {GRANT_HEADER: self.grant, PROOF_HEADER: proof}
        return shown


def request_text(receiver: str, path: str, span: str, moment: str) -> bytes:
    """Return what is signed of a request; no part contains a line break."""
    return "\n".join(("read", receiver, path, span, moment)).encode()
