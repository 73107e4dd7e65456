"""Grants: an agent allows its workers to read a job's snapshots from other nodes (ADR 114).

Under TLS it signs them with the key of its certificate, otherwise with the cluster's key.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from agents.rpc.signing import AGE_S_MAX, TICKET_S, ClusterKey, SignatureError
from agents.rpc.tls import Tls

_GRANT = re.compile(
    r"(until=(\d{1,12}), generation=\d{1,12}, reader=([^,\s]{1,200}), holder=([0-9a-f]{64})), "
    r"(?:mac=([0-9a-f]{64})|certificate=([A-Za-z0-9+/=]{1,4000}), signature=([0-9a-f]{2,400}))\Z"
)


@dataclass(frozen=True, slots=True)
class ReadGrant:
    """A grant that was checked."""

    reader: str
    """The node whose workers read."""
    holder: Ed25519PublicKey
    """It verifies their requests."""
    until: int
    serial: int | None
    """Of the certificate of that node's agent; ``None``: plain HTTP."""


def make_grant(
    key: ClusterKey, tls: Tls | None, job: str, generation: int, reader: str, *, at: float
) -> tuple[str, str]:
    """Return a grant for the workers of a node, and the secret that belongs to it."""
    holder = Ed25519PrivateKey.generate()
    public, form = holder.public_key(), serialization.Encoding.Raw
    shown = public.public_bytes(form, serialization.PublicFormat.Raw).hex()
    until = int(at + TICKET_S)
    about = f"until={until}, generation={generation}, reader={reader}, holder={shown}"
    secret = holder.private_bytes(
        form, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    ).hex()
    if tls is None:
        return f"{about}, mac={key.mac('grant', job, about)}", secret
    der, signature = tls.sign(_signed_text(key, job, about))
    certificate = base64.b64encode(der).decode()
    return f"{about}, certificate={certificate}, signature={signature.hex()}", secret


def check_grant(
    key: ClusterKey, tls: Tls | None, job: str, shown: str | None, *, at: float
) -> ReadGrant:
    """Raise ``SignatureError`` unless the agent of the named node grants to read this job now."""
    form = _GRANT.match(shown or "")
    if form is None:
        raise SignatureError("the grant is missing or malformed")
    about, until, reader, holder, mac, certificate, signature = form.groups()
    serial = None
    if tls is None:
        if not key.is_mac(mac or "", "grant", job, about):
            raise SignatureError("the grant is not for this job")
    else:
        try:
            der = base64.b64decode(certificate or "", validate=True)
            sealed = bytes.fromhex(signature or "")
            owner, serial = tls.check_signed(_signed_text(key, job, about), der, sealed)
        except (ValueError, binascii.Error) as error:
            raise SignatureError(f"the grant is not valid for this job: {error}") from None
        if (owner.role, owner.name) != ("agent", reader):
            raise SignatureError(f"the grant for {reader} is of {owner}")
    grant = ReadGrant(
        reader, Ed25519PublicKey.from_public_bytes(bytes.fromhex(holder)), int(until), serial
    )
    if not -AGE_S_MAX <= grant.until + AGE_S_MAX - at <= TICKET_S + 3 * AGE_S_MAX:
        raise SignatureError("the grant is of another time")
    return grant


def _signed_text(key: ClusterKey, job: str, about: str) -> bytes:
    return f"grant\n{key.cluster}\n{job}\n{about}".encode()
