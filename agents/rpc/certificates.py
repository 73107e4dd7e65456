"""Keys of certificates, and requests for certificates."""

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
    """Return whom a proof of this owner is for: it is worth nothing with another key."""
    public = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return f"{owner.uri}#{hashlib.sha256(public).hexdigest()}"


def request_of(
    owner: Identity, key: ec.EllipticCurvePrivateKey | None = None, proof: str | None = None
) -> tuple[bytes, bytes]:
    """Make a request for a certificate, and its key unless it is given.

    ``proof``: by which a cloud says that the owner is an instance.
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
        builder = builder.add_attribute(AttributeOID.CHALLENGE_PASSWORD, proof.encode())
    made = builder.sign(key, hashes.SHA256())
    return key_pem(key), made.public_bytes(serialization.Encoding.PEM)


def life_left(path: Path) -> float:
    """Return how much of a certificate's life is left, from 1 to 0; 0 if there is none."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return 0.0
    begin, end = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    return max(0.0, (end - time.time()) / (end - begin))


def is_pair(certificate: Path, key: Path) -> bool:
    """Return whether a certificate is of a key, and both can be read."""
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        secret = serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        return False
    return found.public_key() == secret.public_key()


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
