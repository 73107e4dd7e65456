"""Checks the token with which Pub/Sub pushes: who signed it, for whom, and until when."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey, RSAPublicNumbers
from cryptography.hazmat.primitives.hashes import SHA256

ISSUERS = ("https://accounts.google.com", "accounts.google.com")
TOKEN_CHARACTERS_MAX = 8192
CLOCK_S = 60.0
"""How far the issuer's clock may be from ours."""


class TokenError(ValueError):
    """The token is not one that we accept; the message says why."""


def read_keys(path: Path) -> dict[str, RSAPublicKey]:
    """Public keys by their id, from a JSON Web Key Set."""
    try:
        keys = json.loads(path.read_bytes())["keys"]
        return {
            key["kid"]: RSAPublicNumbers(_number(key["e"]), _number(key["n"])).public_key()
            for key in keys
            if key.get("kty") == "RSA"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenError(f"the key set cannot be read: {type(error).__name__}") from None


def check_token(
    token: str, keys: dict[str, RSAPublicKey], *, audience: str, email: str, at: float
) -> None:
    """Raise ``TokenError`` unless this account sent the token to us, just now."""
    if len(token) > TOKEN_CHARACTERS_MAX or token.count(".") != 2:
        raise TokenError("the token has no form that is known")
    head, body, signature = token.split(".")
    header, claims = _object(head), _object(body)
    if header.get("alg") != "RS256":
        raise TokenError("the token is not signed with RS256")
    key = keys.get(str(header.get("kid")))
    if key is None:
        raise TokenError("the token is signed with a key that is not in the set")
    try:
        key.verify(_bytes(signature), f"{head}.{body}".encode(), PKCS1v15(), SHA256())
    except InvalidSignature:
        raise TokenError("the token's signature is wrong") from None
    expires = claims.get("exp")
    if not isinstance(expires, int | float) or expires < at - CLOCK_S:
        raise TokenError("the token has expired")
    if claims.get("iss") not in ISSUERS or claims.get("aud") != audience:
        raise TokenError("the token is for somebody else")
    if claims.get("email") != email or claims.get("email_verified") is not True:
        raise TokenError("the token is of another account")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(_bytes(text))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TokenError("the token cannot be read")
    return value


def _bytes(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        raise TokenError("the token cannot be read") from None


def _number(text: str) -> int:
    return int.from_bytes(_bytes(text), "big")
