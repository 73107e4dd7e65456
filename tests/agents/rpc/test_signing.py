"""Signatures of requests and answers."""

from __future__ import annotations

import pytest

from agents.rpc.signing import (
    AGE_S_MAX,
    SignatureError,
    Verifier,
    check_reply,
    read_key,
    sign_reply,
    sign_request,
)
from simulator.documents.problems import InputError

KEY, OTHER = b"k" * 32, b"o" * 32


def test_a_signed_request_is_accepted_once():
    verifier = Verifier(KEY)
    header, nonce = sign_request(KEY, "POST", "/v1/report?a=1", b"{}", at=1000.0)
    assert verifier.check_request("post", "/v1/report?a=1", b"{}", header, at=1001.0) == nonce
    with pytest.raises(SignatureError, match="received before"):
        verifier.check_request("POST", "/v1/report?a=1", b"{}", header, at=1002.0)


@pytest.mark.parametrize(
    ("method", "path", "body", "at", "why"),
    [
        ("GET", "/v1/report", b"{}", 1000.0, "not signed"),
        ("POST", "/v1/abort", b"{}", 1000.0, "not signed"),
        ("POST", "/v1/report", b"{ }", 1000.0, "not signed"),
        ("POST", "/v1/report", b"{}", 1001.0 + AGE_S_MAX, "too old"),
        ("POST", "/v1/report", b"{}", 999.0 - AGE_S_MAX, "too old"),
    ],
)
def test_a_changed_or_late_request_is_refused(method, path, body, at, why):
    header, _ = sign_request(KEY, "POST", "/v1/report", b"{}", at=1000.0)
    with pytest.raises(SignatureError, match=why):
        Verifier(KEY).check_request(method, path, body, header, at=at)


@pytest.mark.parametrize("header", [None, "", "mac=1", "time=1, nonce=zz, mac=00"])
def test_a_malformed_signature_is_refused(header):
    with pytest.raises(SignatureError, match="malformed"):
        Verifier(KEY).check_request("GET", "/", b"", header, at=0.0)


def test_a_nonce_is_kept_until_its_request_is_too_old():
    verifier = Verifier(KEY)
    header, _ = sign_request(KEY, "GET", "/", b"", at=1000.0)
    verifier.check_request("GET", "/", b"", header, at=1000.0 - AGE_S_MAX)
    other, _ = sign_request(KEY, "GET", "/", b"", at=1000.0)
    verifier.check_request("GET", "/", b"", other, at=1000.0)
    with pytest.raises(SignatureError, match="received before"):
        verifier.check_request("GET", "/", b"", header, at=1000.0 + AGE_S_MAX)


def test_an_answer_is_valid_for_its_own_request_only():
    header = sign_reply(KEY, "a" * 32, 200, b"ok")
    check_reply(KEY, "a" * 32, 200, b"ok", header)
    for wrong in [(OTHER, "a" * 32, 200, b"ok"), (KEY, "b" * 32, 200, b"ok")]:
        with pytest.raises(SignatureError):
            check_reply(*wrong, header)
    for status, body, given in [(500, b"ok", header), (200, b"no", header), (200, b"ok", None)]:
        with pytest.raises(SignatureError):
            check_reply(KEY, "a" * 32, status, body, given)


def test_an_unusable_key_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_key(tmp_path / "none")
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(InputError, match="it needs 16"):
        read_key(tmp_path / "short")
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert read_key(tmp_path / "key") == KEY
