"""Checks the JSON Web Token with which Pub/Sub pushes: signer, audience, account and expiry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jwt

ISSUERS = ("https://accounts.google.com", "accounts.google.com")
TOKEN_CHARACTERS_MAX = 8192
LEEWAY_S = 60.0
"""Tolerated difference between the issuer's clock and ours."""


class TokenError(ValueError):
    """The token is refused; the message says why."""


def read_keys(path: Path) -> dict[str, jwt.PyJWK]:
    """Read public keys, by id, from a file with a JSON Web Key Set."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TokenError(f"unreadable key set: {type(error).__name__}") from None
    return parse_keys(raw)


def parse_keys(raw: bytes) -> dict[str, jwt.PyJWK]:
    """Read public keys, by id, from a JSON Web Key Set."""
    try:
        keys = jwt.PyJWKSet.from_dict(json.loads(raw)).keys
    except (ValueError, RecursionError, TypeError, AttributeError, jwt.PyJWTError) as error:
        raise TokenError(f"unreadable key set: {type(error).__name__}") from None
    return {key.key_id: key for key in keys if key.key_id is not None}


def key_id_of(token: str) -> str:
    """Return the id of the key that a token names; nothing of it is verified yet."""
    if len(token) > TOKEN_CHARACTERS_MAX:
        raise TokenError(f"the token is longer than {TOKEN_CHARACTERS_MAX} characters")
    try:
        return str(jwt.get_unverified_header(token).get("kid", ""))
    except (jwt.PyJWTError, RecursionError) as error:
        raise TokenError(f"the token is refused: {error}") from None


def check_token(token: str, keys: dict[str, jwt.PyJWK], *, audience: str, email: str) -> None:
    """Raise ``TokenError`` unless this account sent the token to this audience, and it is valid."""
    claims = verified_claims(token, keys, audience)
    if claims.get("email") != email or claims.get("email_verified") is not True:
        raise TokenError("the token belongs to another account")


def verified_claims(token: str, keys: dict[str, jwt.PyJWK], audience: str) -> dict[str, Any]:
    """Return what Google says in a token for this audience; raises ``TokenError``."""
    key = keys.get(key_id_of(token))
    if key is None:
        raise TokenError("the token is signed with a key that is not in the key set")
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=["RS256"],
            audience=audience,
            issuer=ISSUERS,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud"], "strict_aud": True},
        )
    except (jwt.PyJWTError, RecursionError) as error:
        raise TokenError(f"the token is refused: {error}") from None
    if isinstance(claims["exp"], str):
        raise TokenError("the token's exp is not a number")
    return claims
