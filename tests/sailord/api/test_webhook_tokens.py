"""Only an unexpired token that the configured account sent to this audience is accepted."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sailord.api.webhook_tokens import TokenError, check_token, read_keys

KEY = generate_private_key(65537, 2048)
OTHER = generate_private_key(65537, 2048)
NOW = time.time()
CLAIMS = {
    "iss": "https://accounts.google.com",
    "aud": "https://head/v1/webhooks/preemption",
    "email": "push@project.iam",
    "email_verified": True,
    "exp": NOW + 3600,
}


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def unsigned(alg: str = "RS256", kid: str = "1", **changes) -> str:
    claims = {name: value for name, value in (CLAIMS | changes).items() if value is not None}
    head = b64(json.dumps({"alg": alg, "kid": kid}).encode())
    return f"{head}.{b64(json.dumps(claims).encode())}"


def token(key=KEY, **changes) -> str:
    text = unsigned(**changes)
    return f"{text}.{b64(key.sign(text.encode(), PKCS1v15(), SHA256()))}"


def signed_with_the_public_key() -> str:
    """The classic attack on verifiers that let the token choose between RSA and HMAC."""
    public = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    text = unsigned(alg="HS256")
    return f"{text}.{b64(hmac.new(public, text.encode(), hashlib.sha256).digest())}"


@pytest.fixture
def keys(tmp_path):
    numbers = KEY.public_key().public_numbers()
    form = {"kty": "RSA", "kid": "1", "e": "AQAB", "n": b64(numbers.n.to_bytes(256, "big"))}
    (tmp_path / "jwks").write_text(json.dumps({"keys": [form]}))
    return read_keys(tmp_path / "jwks")


def check(text, keys):
    check_token(text, keys, audience=CLAIMS["aud"], email=CLAIMS["email"])


@pytest.mark.parametrize(
    "right",
    [
        token(),
        token(iss="accounts.google.com"),
        token(exp=int(NOW) + 3600),
        token(exp=NOW - 30),
        token(iat=NOW + 30),
    ],
)
def test_valid_token_is_accepted_within_60_s_of_clock_skew(right, keys):
    check(right, keys)


@pytest.mark.parametrize(
    "wrong",
    [
        token(OTHER),
        token(alg="none"),
        token(alg="HS256"),
        token(alg="RS512"),
        token(kid="2"),
        token(exp=1000.0),
        token(exp=str(int(NOW) + 3600)),
        token(exp=None),
        token(nbf=NOW + 3600),
        token(iat=NOW + 3600),
        token(aud="https://elsewhere"),
        token(aud=[CLAIMS["aud"], "https://elsewhere"]),
        token(aud=None),
        token(iss="https://elsewhere"),
        token(iss=None),
        token(email="other@project.iam"),
        token(email=None),
        token(email_verified=False),
        token(email_verified="true"),
        token()[:-8] + "AAAAAAAA",
        unsigned(alg="none") + ".",
        unsigned() + ".",
        signed_with_the_public_key(),
        jwt.encode(CLAIMS, "a-secret-of-32-bytes-or-more-here", headers={"kid": "1"}),
        "a.b.c",
        "a.b",
        "..",
        "",
        f"{b64(b'[' * 5000)}.e30.e30",
        "x" * 10_000,
    ],
)
def test_any_other_token_is_refused(wrong, keys):
    with pytest.raises(TokenError):
        check(wrong, keys)


def test_unreadable_key_set_is_an_error(tmp_path):
    for text in ("", "{}", '{"keys": 3}', '{"keys": [3]}', '{"keys": [{"kty": "RSA"}]}'):
        (tmp_path / "jwks").write_text(text)
        with pytest.raises(TokenError):
            read_keys(tmp_path / "jwks")
    with pytest.raises(TokenError):
        read_keys(tmp_path / "missing")
