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

from sailord.api.access.webhook_tokens import TokenError, check_token, read_keys

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
    ("claim", "value"),
    [("iss", "accounts.google.com"), ("exp", int(CLAIMS["exp"])), ("iat", NOW)],
    ids=["issuer without https", "whole seconds", "with iat"],
)
def test_valid_token_is_accepted(claim, value, keys):
    check(token(**{claim: value}), keys)


@pytest.mark.parametrize(("claim", "skew_s"), [("exp", -30), ("iat", 30), ("nbf", 30)])
def test_clock_skew_up_to_60_s_is_tolerated(claim, skew_s, keys):
    check(token(**{claim: time.time() + skew_s}), keys)


WRONG = {
    "signed with another key": token(OTHER),
    "alg none": token(alg="none"),
    "alg HS256": token(alg="HS256"),
    "alg RS512": token(alg="RS512"),
    "unknown key id": token(kid="2"),
    "expired": token(exp=1000.0),
    "exp as text": token(exp=str(int(NOW) + 3600)),
    "no exp": token(exp=None),
    "not valid yet": token(nbf=NOW + 3600),
    "issued in the future": token(iat=NOW + 3600),
    "other audience": token(aud="https://elsewhere"),
    "several audiences": token(aud=[CLAIMS["aud"], "https://elsewhere"]),
    "no audience": token(aud=None),
    "other issuer": token(iss="https://elsewhere"),
    "no issuer": token(iss=None),
    "other account": token(email="other@project.iam"),
    "no account": token(email=None),
    "unverified account": token(email_verified=False),
    "verified as text": token(email_verified="true"),
    "altered signature": token()[:-8] + "AAAAAAAA",
    "alg none, unsigned": unsigned(alg="none") + ".",
    "unsigned": unsigned() + ".",
    "HMAC with the public key": signed_with_the_public_key(),
    "HMAC with a secret": jwt.encode(
        CLAIMS, "a-secret-of-32-bytes-or-more-here", headers={"kid": "1"}
    ),
    "three parts of no JSON": "a.b.c",
    "two parts": "a.b",
    "empty parts": "..",
    "empty": "",
    "deeply nested": f"{b64(b'[' * 5000)}.e30.e30",
    "too long": "x" * 10_000,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.usefixtures("no_collection")
def test_any_other_token_is_refused(wrong, keys):
    with pytest.raises(TokenError):
        check(WRONG[wrong], keys)


def test_unreadable_key_set_is_an_error(tmp_path):
    for text in ("", "{}", '{"keys": 3}', '{"keys": [3]}', '{"keys": [{"kty": "RSA"}]}'):
        (tmp_path / "jwks").write_text(text)
        with pytest.raises(TokenError):
            read_keys(tmp_path / "jwks")
    with pytest.raises(TokenError):
        read_keys(tmp_path / "missing")
