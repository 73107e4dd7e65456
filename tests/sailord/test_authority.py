"""The authority issues, renews, revokes and enrols; its folder is checked."""

from __future__ import annotations

import datetime as dt
import errno
import json
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from agents.rpc.certificates import key_pem, new_key, request_of, share_of_life_left
from agents.rpc.identity import Identity, identity_of, read_identity
from agents.rpc.tls import read_certificate
from agents.rpc.tls_settings import TlsSettings
from sailord import authority as module
from sailord import own_certificate
from sailord.authority import KEPT_S, Authority, Issued, hosts_of
from sailord.cli.main import main
from sailord.own_certificate import open_tls
from simulator.documents.problems import InputError
from tests.sailord.certificates import files_in
from worker.atomic_file import OWNER_ONLY, replace_file, replacing

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


def test_a_sailord_renews_by_its_certificate_and_by_nothing_else(authority, tmp_path):
    """The cluster's key, which every agent has, makes no sailord; nor does an agent's
    certificate."""
    standby = Identity("test", "sailord", "two")
    authority.issue("sailord", "two", tmp_path / "two")
    assert authority.enrol(request_of(standby)[1], standby)
    with pytest.raises(InputError, match="sailord/two: shows no valid certificate"):
        authority.enrol(request_of(standby)[1], None)
    for other in (NODE, Identity("test", "sailord", "three")):
        with pytest.raises(InputError, match=f"is of {other}"):
            authority.enrol(request_of(standby)[1], other)
    authority.revoke("sailord/two")
    with pytest.raises(InputError, match="was revoked"):
        authority.enrol(request_of(standby)[1], standby)


def test_an_enrolled_name_is_not_given_to_another(authority):
    _, request = request_of(NODE)
    authority.enrol(request_of(NODE)[1], None)
    with pytest.raises(InputError, match="has a valid certificate"):
        authority.enrol(request, None)
    assert authority.enrol(request, NODE), "it renews its own"
    with pytest.raises(InputError, match=r"agent/n1, and is of agent/n2"):
        authority.enrol(request, Identity("test", "agent", "n2"))


def test_a_request_that_is_repeated_is_signed_again_unless_its_name_was_revoked(authority):
    """Its answer was lost. An earlier version issued without noting the key."""
    key = new_key()
    _, request = request_of(NODE, key)
    for _ in range(2):
        authority.enrol(request_of(NODE, key)[1], None, instance="1")
    for other, instance in ((request_of(NODE)[1], "1"), (request, "")):
        with pytest.raises(InputError, match="has a valid certificate"):
            authority.enrol(other, None, instance=instance)
    authority.revoke("agent/n1")
    with pytest.raises(InputError, match="was revoked"):
        authority.enrol(request, None)
    authority._write([Issued("1", NODE.uri, time.time() + 100.0)])
    with pytest.raises(InputError, match="has a valid certificate"):
        authority.enrol(request, None)


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
    authority.enrol(request_of(NODE)[1], None, instance="1")
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


def test_a_folder_that_cannot_be_renewed_keeps_no_other_from_it(authority, tmp_path):
    """Otherwise all nodes listed after a revoked one would lose their certificates within days."""
    ca = ("--folder", str(tmp_path / "ca"))
    folders = [tmp_path / name for name in ("n1", "missing", "n2", "etcd1")]
    for folder in (folders[0], folders[2]):
        authority.issue("agent", folder.name, folder)
    hosts = ["10.0.0.1", "etcd1.internal"]
    authority.issue("store", "etcd1", folders[3], hosts=hosts)
    authority.revoke("agent/n1")
    done = sailorctl("ca", "renew", "--now", *map(str, folders), *ca)
    assert done.exit_code == 2
    assert "renewed agent/n2" in done.output
    assert "renewed store/etcd1" in done.output
    assert done.output.count("error: ") == 2
    assert hosts_of(folders[3] / "certificate.pem") == hosts


def test_a_key_without_its_certificate_is_renewed(authority, tmp_path):
    """A crash in the middle of a renewal leaves it so."""
    authority.issue("agent", "n1", tmp_path / "n1")
    replace_file(tmp_path / "n1" / "key.pem", key_pem(new_key()), mode=OWNER_ONLY)
    done = sailorctl("ca", "renew", str(tmp_path / "n1"), "--folder", str(tmp_path / "ca"))
    assert "renewed agent/n1" in done.output


def test_a_clock_that_was_ahead_shuts_nobody_out(authority, tmp_path, monkeypatch):
    """The list of revoked certificates is everybody's; a certificate is made anew."""
    ahead = dt.datetime.now(dt.UTC) + dt.timedelta(days=30)
    later = SimpleNamespace(now=lambda _: ahead, fromtimestamp=dt.datetime.fromtimestamp)
    with monkeypatch.context() as patch:
        patch.setattr(module, "dt", SimpleNamespace(**vars(dt) | {"datetime": later}))
        authority.issue("sailord", "head", tmp_path / "head")
    crl = x509.load_pem_x509_crl((tmp_path / "ca" / "revoked.pem").read_bytes())
    assert crl.last_update_utc < dt.datetime.now(dt.UTC) < crl.next_update_utc
    assert share_of_life_left(tmp_path / "head" / "certificate.pem") == 0.0
    settings = TlsSettings(files_in(tmp_path / "head"), str(tmp_path / "ca"))
    config: Any = SimpleNamespace(tls=settings, cluster_name="test")
    open_tls(config)
    assert share_of_life_left(tmp_path / "head" / "certificate.pem") > 0.9


def test_a_sailord_that_cannot_renew_starts_with_what_it_has(authority, tmp_path, monkeypatch):
    """Its disk may be full; with exit code 2 systemd would start it no more."""
    head = tmp_path / "head"
    authority.issue("sailord", "head", head)
    settings = TlsSettings(files_in(head), str(tmp_path / "ca"))
    config: Any = SimpleNamespace(tls=settings, cluster_name="test")
    before = [path.read_bytes() for path in sorted(head.iterdir())]

    def full(real: Any, name: str) -> Any:
        def act(path: Path, *others: Any, **more: Any) -> Any:
            if path.name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(path, *others, **more)

        return act

    monkeypatch.setattr(own_certificate, "RENEW_AT", 2.0)
    for name in ("issued.jsonl", "certificate.pem"):
        with monkeypatch.context() as patch:
            patch.setattr(module, "replacing", full(replacing, name))
            assert open_tls(config).own.role == "sailord"
            assert [path.read_bytes() for path in sorted(head.iterdir())] == before
            (head / "certificate.pem").rename(tmp_path / "kept")
            with pytest.raises(InputError, match="No space left"):
                open_tls(config)
            (tmp_path / "kept").rename(head / "certificate.pem")


def test_what_root_writes_belongs_to_the_owner_of_the_folder(authority, tmp_path, monkeypatch):
    """Under a strict umask sailord could else read neither the lists nor a renewed key."""
    given: dict[str, tuple[int, int]] = {}

    def give(descriptor: int, user: int, group: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        given[place.name.removeprefix(".").removesuffix(".new")] = user, group

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", give)
    authority.issue("agent", "n1", tmp_path / "n1")
    authority.revoke("agent/n1")
    names = ("lock", "issued.jsonl", "revoked.pem", "key.pem", "certificate.pem", "ca.pem")
    owner = authority.folder.stat()
    assert given == dict.fromkeys(names, (owner.st_uid, owner.st_gid))


@pytest.mark.parametrize("days", ["nan", "inf", "0"])
def test_certificates_are_valid_for_a_number_of_days(authority, tmp_path, days):
    words = ("user/alice", "--out", str(tmp_path / "alice"), "--folder", str(authority.folder))
    assert sailorctl("ca", "issue", *words, "--days", days).exit_code == 2


def test_a_sailord_whose_certificate_is_of_another_key_makes_both_anew(authority, tmp_path):
    """A crash between the two files of a renewal leaves them so."""
    head = tmp_path / "head"
    authority.issue("sailord", "head", head)
    replace_file(head / "key.pem", key_pem(new_key()), mode=OWNER_ONLY)
    settings = TlsSettings(files_in(head), str(tmp_path / "ca"))
    config: Any = SimpleNamespace(tls=settings, cluster_name="test")
    assert open_tls(config).own.role == "sailord"
