"""A sailord without an authority: its certificate is checked, and its end is warned of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from agents.rpc.tls_settings import TlsSettings
from sailord.authority import Authority
from sailord.main import main
from sailord.own_certificate import open_tls
from simulator.documents.problems import InputError
from tests.sailord.certificates import files_in
from tests.sailord.daemon.running import Place

FILES = ("ca", "certificate", "key", "revoked")


@pytest.fixture
def authority(tmp_path):
    return Authority.create(tmp_path / "ca", "test")


def check(tmp_path, tls: str) -> tuple[int, str]:
    place = Place(tmp_path, webhooks=f"[tls]\n{tls}")
    done = CliRunner().invoke(main, ["check", "--config", str(place.config)])
    return done.exit_code, done.output


def test_check_finds_that_a_standby_has_no_authority(authority, tmp_path):
    assert check(tmp_path, 'authority = "ca"\n')[0] == 0
    assert not (tmp_path / "head" / "tls").exists(), "a check makes no certificate"
    authority.folder.rename(tmp_path / "elsewhere")
    code, told = check(tmp_path, 'authority = "ca"\n')
    assert code == 2
    assert "a standby sailord gets a certificate from there (docs/operations.md" in told


def test_check_reads_the_certificate_that_an_operator_issued(authority, tmp_path):
    section = "".join(f'{name} = "tls/{name}.pem"\n' for name in FILES)
    code, told = check(tmp_path, section)
    assert (code, "certificate.pem: cannot be read" in told) == (2, True)
    authority.issue("agent", "n1", tmp_path / "tls")
    code, told = check(tmp_path, section)
    assert (code, "issue one of sailord/" in told) == (2, True)
    authority.issue("sailord", "standby", tmp_path / "tls")
    assert check(tmp_path, section)[0] == 0


@pytest.mark.parametrize(
    ("share", "days", "warns"), [(0.9, 0.5, False), (0.2, 0.5, True), (0.2, 30, False)]
)
def test_a_certificate_that_nobody_renews_is_warned_of_on_its_last_day(
    authority, tmp_path, monkeypatch, share, days, warns
):
    authority.issue("sailord", "standby", tmp_path / "tls", days=days)
    monkeypatch.setattr("sailord.own_certificate.share_of_life_left", lambda _: share)
    config: Any = SimpleNamespace(tls=TlsSettings(files_in(tmp_path / "tls")), cluster_name="test")
    with capture_logs() as told:
        assert open_tls(config).own.name == "standby"
    errors = [str(line.get("error")) for line in told]
    assert (
        any("nobody has renewed it; renew it where the authority is" in e for e in errors) == warns
    )


def test_a_standby_that_enrols_needs_a_first_certificate_and_takes_one_signed_before_a_crash(
    authority, tmp_path
):
    """Its ``enrol`` answers only who shows a certificate."""
    own = tmp_path / "head" / "tls"
    tls = f'ca = "{authority.folder}/ca.pem"\nenrol = "10.0.0.1:7077"\n'
    code, told = check(tmp_path, tls)
    assert code == 2
    assert f"sailorctl ca issue sailord/NAME --out DIR; copy DIR to {own}" in told
    authority.issue("sailord", "two", own)
    assert check(tmp_path, tls)[0] == 0
    # Its next certificate is saved, and its key is not in its place yet.
    authority.issue("sailord", "two", tmp_path / "next")
    (tmp_path / "next" / "key.pem").rename(own / ".key.pem.next")
    (tmp_path / "next" / "certificate.pem").rename(own / "certificate.pem")
    assert check(tmp_path, tls)[0] == 0
    assert not (own / ".key.pem.next").exists()
    authority.issue("sailord", "two", own, days=1e-9)
    code, told = check(tmp_path, tls)
    assert (code, "has expired; where the authority is: " in told) == (2, True)


def test_a_certificate_that_has_expired_is_refused(authority, tmp_path):
    authority.issue("sailord", "standby", tmp_path / "tls", days=1e-9)
    config: Any = SimpleNamespace(tls=TlsSettings(files_in(tmp_path / "tls")), cluster_name="test")
    with pytest.raises(InputError, match="has expired; renew it"):
        open_tls(config)
