"""Makes keys and certificate requests, and tells how much of a certificate's life is left."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import AttributeOID, NameOID

from agents.rpc.identity import Identity


def proof_audience(owner: Identity, key: ec.EllipticCurvePublicKey) -> str:
    """Return the audience that a proof of this owner must name; it binds the proof to the key."""
    return f"{owner.uri}#{hash_of_key(key)}"


def hash_of_key(key: ec.EllipticCurvePublicKey) -> str:
    """Return the hash that identifies a key."""
    public = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(public).hexdigest()


def request_of(
    owner: Identity, key: ec.EllipticCurvePrivateKey | None = None, proof: str | None = None
) -> tuple[bytes, bytes]:
    """Return a private key in PEM, ``key`` or a new one, and a certificate request signed with it.

    ``proof``: a token in which the cloud says that the owner is an instance.
    """
    key = key or new_key()
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(owner)[:64])]))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(owner.uri)]),
            critical=False,
        )
    )
    if proof is not None:
        # The standard attribute by which a requester shows that it may have the certificate.
        builder = builder.add_attribute(AttributeOID.CHALLENGE_PASSWORD, proof.encode())
    made = builder.sign(key, hashes.SHA256())
    return key_pem(key), made.public_bytes(serialization.Encoding.PEM)


def share_of_life_left(path: Path) -> float:
    """Return how much of a certificate's life is left, from 1 to 0; 0 if there is none.

    One that is not valid yet counts as none: it was made while a clock was ahead.
    """
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return 0.0
    begin, end = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    now = time.time()
    return 0.0 if now < begin else max(0.0, (end - now) / (end - begin))


def is_pair(certificate: Path, key: Path) -> bool:
    """Return whether a certificate belongs to a key, and both can be read."""
    secret = read_key(key)
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError):
        return False
    return secret is not None and found.public_key() == secret.public_key()


def read_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    """Read a private key; ``None`` if there is none, or it is unusable."""
    try:
        found = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        return None
    return found if isinstance(found, ec.EllipticCurvePrivateKey) else None


def new_key() -> ec.EllipticCurvePrivateKey:
    """Make a private key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as the content of its file."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
