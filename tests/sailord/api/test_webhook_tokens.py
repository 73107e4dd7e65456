"""Only the token that the right account sent to us, just now, is accepted."""

from __future__ import annotations

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256

from sailord.api.webhook_tokens import TokenError, check_token, read_keys

KEY = generate_private_key(65537, 2048)
OTHER = generate_private_key(65537, 2048)
CLAIMS = {
    "iss": "https://accounts.google.com",
    "aud": "https://head/v1/webhooks/preemption",
    "email": "push@project.iam",
    "email_verified": True,
    "exp": 2000.0,
}


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def token(key=KEY, *, alg: str = "RS256", kid: str = "1", **changes) -> str:
    head = b64(json.dumps({"alg": alg, "kid": kid}).encode())
    text = f"{head}.{b64(json.dumps(CLAIMS | changes).encode())}"
    return f"{text}.{b64(key.sign(text.encode(), PKCS1v15(), SHA256()))}"


@pytest.fixture
def keys(tmp_path):
    numbers = KEY.public_key().public_numbers()
    form = {"kty": "RSA", "kid": "1", "e": "AQAB", "n": b64(numbers.n.to_bytes(256, "big"))}
    (tmp_path / "jwks").write_text(json.dumps({"keys": [form]}))
    return read_keys(tmp_path / "jwks")


def check(text, keys):
    check_token(text, keys, audience=CLAIMS["aud"], email=CLAIMS["email"], at=1990.0)


def test_the_right_token_is_accepted(keys):
    check(token(), keys)


@pytest.mark.parametrize(
    "wrong",
    [
        token(OTHER),
        token(alg="none"),
        token(alg="HS256"),
        token(kid="2"),
        token(exp=1000.0),
        token(exp="2000"),
        token(aud="https://elsewhere"),
        token(iss="https://elsewhere"),
        token(email="other@project.iam"),
        token(email_verified=False),
        token()[:-8] + "AAAAAAAA",
        "a.b.c",
        "a.b",
        "..",
        "x" * 10_000,
    ],
)
def test_any_other_is_refused(wrong, keys):
    with pytest.raises(TokenError):
        check(wrong, keys)


def test_a_key_set_that_cannot_be_read_is_told(tmp_path):
    for text in ("", "{}", '{"keys": 3}', '{"keys": [3]}', '{"keys": [{"kty": "RSA"}]}'):
        (tmp_path / "jwks").write_text(text)
        with pytest.raises(TokenError):
            read_keys(tmp_path / "jwks")
