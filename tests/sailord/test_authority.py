"""The authority issues, renews, revokes and enrols; its folder is checked."""

from __future__ import annotations

import json
import stat
import time
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agents.rpc.certificates import key_pem, new_key, request_of
from agents.rpc.identity import Identity, identity_of, read_identity
from agents.rpc.tls import read_certificate
from agents.rpc.tls_settings import TlsSettings
from sailord.authority import KEPT_S, Authority, Issued
from sailord.cli.main import main
from sailord.own_certificate import open_tls
from simulator.documents.problems import InputError
from tests.sailord.certificates import files_in
from worker.atomic_file import OWNER_ONLY, replace_file

NODE = Identity("test", "agent", "n1")


def sailorctl(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.fixture
def authority(tmp_path):
    return Authority.create(tmp_path / "ca", "test")


def test_a_certificate_names_cluster_role_and_name(authority, tmp_path):
    owner = authority.issue("agent", "n1", tmp_path / "n1")
    assert owner == read_certificate(tmp_path / "n1" / "certificate.pem")[0] == NODE
    assert owner.uri == "sailor://test/agent/n1"


def test_other_names_in_certificates_are_no_identity():
    for uri in ("sailor://a/b/c", "sailor://a/user/../x", "https://a/agent/b", "sailor://a/agent/"):
        assert read_identity(uri) is None
    two = {"subjectAltName": (("URI", NODE.uri), ("URI", "sailor://test/sailord/head"))}
    assert identity_of(two) is None, "which of the two?"


def test_secrets_are_for_their_owner_alone(authority, tmp_path):
    authority.issue("agent", "n1", tmp_path / "n1")
    for path in (tmp_path / "ca" / "ca.key", tmp_path / "n1" / "key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "ca" / "ca.key").chmod(0o640)
    with pytest.raises(InputError, match="mode 0640 lets others use it; chmod 600"):
        Authority.open(tmp_path / "ca")


@pytest.mark.usefixtures("authority")
def test_a_second_authority_in_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="has an authority already"):
        Authority.create(tmp_path / "ca", "test")
    with pytest.raises(InputError, match="--cluster"):
        Authority.create(tmp_path / "other", "No Name")
    with pytest.raises(InputError, match="sailorctl ca init"):
        Authority.open(tmp_path / "none").issued()


def test_an_enrolled_name_is_not_given_to_another(authority):
    _, request = request_of(NODE)
    authority.enrol(request, None)
    with pytest.raises(InputError, match="has a valid certificate"):
        authority.enrol(request, None)
    assert authority.enrol(request, NODE), "it renews its own"
    with pytest.raises(InputError, match=r"agent/n1, and is of agent/n2"):
        authority.enrol(request, Identity("test", "agent", "n2"))


def test_a_revoked_name_returns_only_by_an_operators_order(authority):
    _, request = request_of(NODE)
    authority.enrol(request, None)
    authority.revoke("agent/n1")
    with pytest.raises(InputError, match="was revoked; to let it return"):
        authority.enrol(request, None)
    authority.revoke("agent/n1", may_return=True)
    assert authority.enrol(request, None)


def test_a_revoked_certificate_is_not_renewed_over_a_connection_that_stands(authority):
    authority.enrol(request_of(NODE)[1], None)
    assert authority.enrol(request_of(NODE)[1], NODE)
    authority.revoke("agent/n1")
    with pytest.raises(InputError, match="was revoked"):
        authority.enrol(request_of(NODE)[1], NODE)


def test_a_name_goes_from_one_rented_instance_to_the_next_and_no_other_way(authority):
    """A managed group makes a preempted instance anew, under its name."""
    request = request_of(NODE)[1]
    authority.enrol(request, None, instance="1")
    for same in ("1", ""):
        with pytest.raises(InputError, match="has a valid certificate"):
            authority.enrol(request, None, instance=same)
    assert authority.enrol(request, None, instance="2")
    assert authority.enrol(request, NODE), "it renews its own"
    assert [(each.instance, each.revoked is None) for each in authority.issued()] == [
        ("1", False), ("2", True), ("2", True),
    ]  # fmt: skip
    authority.revoke("agent/n1")
    with pytest.raises(InputError, match="was revoked"):
        authority.enrol(request, None, instance="3")


def test_a_rented_instances_name_is_not_given_to_one_that_was_shut_out_or_not_rented(authority):
    authority.enrol(request_of(NODE)[1], None)
    with pytest.raises(InputError, match="has a valid certificate"):
        authority.enrol(request_of(NODE)[1], None, instance="1")


def test_the_end_of_an_instance_revokes_what_it_has_and_no_more(authority):
    authority.enrol(request_of(NODE)[1], None, instance="1")
    assert not authority.end_instance("n1", "2"), "another one has the name"
    assert not authority.end_instance("n2", "1")
    assert authority.end_instance("n1", "1")
    assert [each.state(0.0) for each in authority.issued()] == ["revoked"]
    with pytest.raises(InputError, match="was revoked; enrol without that certificate"):
        authority.enrol(request_of(NODE)[1], NODE)
    assert authority.enrol(request_of(NODE)[1], None, instance="2")
    authority.revoke("agent/n1")
    assert not authority.end_instance("n1", "2")
    assert not authority.issued()[-1].may_return, "an operator shut it out"


def test_the_list_is_read_by_other_versions(authority):
    authority.enrol(request_of(NODE)[1], None)
    path = authority.folder / "issued.jsonl"
    assert "instance" not in json.loads(path.read_text())
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}) + "\n")
    assert authority.issued()[0].owner == NODE


def test_certificates_that_expired_long_ago_leave_the_list_unless_shut_out(authority):
    rows = [
        Issued(f"a{number}", Identity("test", "agent", name).uri, time.time() - age_s, **how)
        for number, (name, age_s, how) in enumerate([
            ("expired", KEPT_S + 60, {}),
            ("lately", KEPT_S - 60, {}),
            ("shut-out", KEPT_S + 60, {"revoked": 1.0}),
            ("returned", KEPT_S + 60, {"revoked": 1.0, "may_return": True}),
        ])
    ]  # fmt: skip
    (authority.folder / "issued.jsonl").write_text("".join(row.line() for row in rows))
    authority.issue("user", "alice", authority.folder.parent / "alice")
    left = [each.owner.name for each in authority.issued()]
    assert left == ["lately", "shut-out", "alice"]
    with pytest.raises(InputError, match="was revoked"):
        authority.enrol(request_of(Identity("test", "agent", "shut-out"))[1], None)


def test_only_agents_of_this_cluster_are_enrolled(authority):
    for wrong in (
        Identity("test", "sailord", "head"),
        Identity("test", "user", "eve"),
        Identity("other", "agent", "n1"),
    ):
        with pytest.raises(InputError, match="asks for"):
            authority.enrol(request_of(wrong)[1], None)
    with pytest.raises(InputError, match="is not a request"):
        authority.enrol(b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n", None)


def test_the_command_line_makes_lists_renews_and_revokes(tmp_path):
    ca = ("--folder", str(tmp_path / "ca"))
    out = str(tmp_path / "alice")
    assert sailorctl("ca", "init", "--cluster", "prod", *ca).exit_code == 0
    assert "of user/alice" in sailorctl("ca", "issue", "user/alice", "--out", out, *ca).output
    assert "is not due" in sailorctl("ca", "renew", out, *ca).output
    assert "renewed user/alice" in sailorctl("ca", "renew", out, "--now", *ca).output
    assert "revoked 2 certificates" in sailorctl("ca", "revoke", "user/alice", *ca).output
    rows = json.loads(sailorctl("ca", "list", "--json", *ca).output)
    assert [row["state"] for row in rows] == ["revoked", "revoked"]
    for words, why in [
        (("renew", out), "user/alice is revoked"),
        (("revoke", "user/bob"), "was never issued"),
        (("issue", "root/bob", "--out", out), "is not a member's name"),
        (("issue", "store/one", "--out", out), "has no --host"),
        (("issue", "agent/n1", "--out", out, "--host", "10.0.0.1"), "has a --host"),
        (
            ("issue", "store/one", "--out", out, "--host", "head.sailord.prod.sailor"),
            "not an address",
        ),
    ]:
        refused = sailorctl("ca", *words, *ca)
        assert refused.exit_code == 2
        assert why in refused.output


def test_a_sailord_whose_certificate_is_of_another_key_makes_both_anew(authority, tmp_path):
    """A crash between the two files of a renewal leaves them so."""
    head = tmp_path / "head"
    authority.issue("sailord", "head", head)
    replace_file(head / "key.pem", key_pem(new_key()), mode=OWNER_ONLY)
    settings = TlsSettings(files_in(head), str(tmp_path / "ca"))
    config: Any = SimpleNamespace(tls=settings, cluster_name="test")
    assert open_tls(config).own.role == "sailord"
