"""Signatures of requests and answers."""

from __future__ import annotations

import pytest

from agents.rpc.signing import (
    AGE_S_MAX,
    TICKET_S,
    ClusterKey,
    SignatureError,
    Verifier,
    check_reply,
    check_ticket,
    read_keys,
    sign_reply,
    sign_request,
    ticket,
)
from simulator.documents.problems import InputError

KEY, OTHER = (ClusterKey("test", (each * 32,)) for each in (b"k", b"o"))
HERE = "10.0.0.1:7078"


def test_a_signed_request_is_accepted_once():
    verifier = Verifier(KEY, lambda: HERE)
    header, nonce = sign_request(KEY, HERE, "POST", "/v1/report?a=1", b"{}", at=1000.0)
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
    header, _ = sign_request(KEY, HERE, "POST", "/v1/report", b"{}", at=1000.0)
    with pytest.raises(SignatureError, match=why):
        Verifier(KEY, lambda: HERE).check_request(method, path, body, header, at=at)


@pytest.mark.parametrize("header", [None, "", "mac=1", "time=1, nonce=zz, mac=00"])
def test_a_malformed_signature_is_refused(header):
    with pytest.raises(SignatureError, match="malformed"):
        Verifier(KEY, lambda: HERE).check_request("GET", "/", b"", header, at=0.0)


def test_a_nonce_is_kept_until_its_request_is_too_old():
    now_s = 50.0
    verifier = Verifier(KEY, lambda: HERE, clock_s=lambda: now_s)
    header, _ = sign_request(KEY, HERE, "GET", "/", b"", at=1000.0)
    verifier.check_request("GET", "/", b"", header, at=1000.0 - AGE_S_MAX)
    other, _ = sign_request(KEY, HERE, "GET", "/", b"", at=1000.0)
    now_s += AGE_S_MAX
    verifier.check_request("GET", "/", b"", other, at=1000.0)
    now_s += AGE_S_MAX
    with pytest.raises(SignatureError, match="received before"):
        verifier.check_request("GET", "/", b"", header, at=1000.0 + AGE_S_MAX)


def test_nonces_are_forgotten_though_the_system_clock_was_set_back(monkeypatch):
    monkeypatch.setattr("agents.rpc.signing.NONCES_MAX", 3)
    now_s = 50.0
    verifier = Verifier(KEY, lambda: HERE, now_s, lambda: now_s)

    def ask(at: float) -> None:
        header, _ = sign_request(KEY, HERE, "GET", "/", b"", at=at)
        verifier.check_request("GET", "/", b"", header, at=at)

    for _ in range(3):
        ask(10_000.0)
    with pytest.raises(SignatureError, match="too many"):
        ask(10_000.0)
    now_s += 2 * AGE_S_MAX + 1
    ask(10_000.0 - 3600.0 + 2 * AGE_S_MAX + 1)


def test_a_process_answers_though_the_system_clock_was_set_back_after_its_start():
    now_s = 50.0
    verifier = Verifier(KEY, lambda: HERE, now_s, lambda: now_s)

    def ask(sent: float, at: float) -> None:
        header, _ = sign_request(KEY, HERE, "GET", "/", b"", at=sent)
        verifier.check_request("GET", "/", b"", header, at=at)

    now_s += 1.0
    ask(10_000.0, at=10_000.0)
    now_s += 1.0
    for sent in (6400.0, 6399.0):
        ask(sent, at=6400.0)
    with pytest.raises(SignatureError, match="older than this process"):
        ask(6397.0, at=6400.0)


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
        read_keys(tmp_path / "none")
    (tmp_path / "short").write_text("abc\n")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(InputError, match="it needs 16"):
        read_keys(tmp_path / "short")
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32 + b"\n")
    key.chmod(0o640)
    with pytest.raises(InputError, match="mode 0640 lets others use it"):
        read_keys(key)
    key.chmod(0o600)
    assert read_keys(key) == (b"k" * 32,)


def test_a_request_to_one_agent_is_refused_by_another_and_in_another_cluster():
    header, _ = sign_request(KEY, HERE, "POST", "/v1/abort", b"{}", at=1000.0)
    about = "POST", "/v1/abort", b"{}", header
    with pytest.raises(SignatureError, match=r"not for 10\.0\.0\.2:7078"):
        Verifier(KEY, lambda: "10.0.0.2:7078").check_request(*about, at=1000.0)
    other = ClusterKey("other", KEY.keys)
    with pytest.raises(SignatureError, match="not signed"):
        Verifier(other, lambda: HERE).check_request(*about, at=1000.0)


def test_a_request_from_before_a_restart_is_refused():
    header, _ = sign_request(KEY, HERE, "POST", "/v1/abort", b"{}", at=1000.0)
    about = "POST", "/v1/abort", b"{}", header
    Verifier(KEY, lambda: HERE, 50.0, lambda: 51.0).check_request(*about, at=1001.0)
    with pytest.raises(SignatureError, match="older than this process"):
        Verifier(KEY, lambda: HERE, 50.5, lambda: 51.0).check_request(*about, at=1001.0)


def write_keys(path, *keys):
    """Replace the file, as an operator does; the next look reads it."""
    path.write_text("".join(f"{key * 32}\n" for key in keys))
    path.chmod(0o600)


def test_a_key_is_replaced_machine_by_machine_without_a_refused_message(tmp_path, monkeypatch):
    monkeypatch.setattr("agents.rpc.signing.LOOK_S", 0.0)
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        write_keys(path, "o")
    ends = [ClusterKey.read(path, "test") for path in paths]

    def exchange():
        for one, other in (ends, ends[::-1]):
            header, nonce = sign_request(one, HERE, "GET", "/", b"", at=1000.0)
            verifier = Verifier(other, lambda: HERE)
            assert verifier.check_request("GET", "/", b"", header, at=1000.0) == nonce
            check_reply(one, nonce, 200, b"ok", sign_reply(other, nonce, 200, b"ok"))

    for keys in (("o", "n"), ("n", "o"), ("n",)):
        for path in paths:
            write_keys(path, *keys)
            exchange()
    header, _ = sign_request(ClusterKey("test", (b"o" * 32,)), HERE, "GET", "/", b"", at=1000.0)
    with pytest.raises(SignatureError, match="not signed"):
        Verifier(ends[0], lambda: HERE).check_request("GET", "/", b"", header, at=1000.0)


def test_a_key_file_that_cannot_be_used_leaves_the_key_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("agents.rpc.signing.LOOK_S", 0.0)
    path = tmp_path / "key"
    write_keys(path, "o")
    key = ClusterKey.read(path, "test")
    path.write_text("short")
    assert key.present() == (b"o" * 32,)
    path.unlink()
    assert key.present() == (b"o" * 32,)


def test_a_ticket_is_for_one_job_and_expires():
    shown = ticket(KEY, "job", 3, "a", at=1000.0)
    assert check_ticket(KEY, "job", shown, at=1000.0 + TICKET_S) == "a"
    later = 1000.0 + TICKET_S + AGE_S_MAX + 1
    for key, job, given, at, why in [
        (KEY, "job", shown, later, "has expired"),
        (KEY, "other", shown, 1000.0, "not for this job"),
        (OTHER, "job", shown, 1000.0, "not for this job"),
        (KEY, "job", shown.replace("reader=a", "reader=b"), 1000.0, "not for this job"),
        (KEY, "job", shown.replace("until=4", "until=9"), 1000.0, "not for this job"),
        (KEY, "job", None, 1000.0, "missing or malformed"),
    ]:
        with pytest.raises(SignatureError, match=why):
            check_ticket(key, job, given, at=at)
