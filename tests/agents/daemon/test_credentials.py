"""A bare name is a credential of the unit if there is one; everything else is a path."""

from __future__ import annotations

from pathlib import Path

from agents.daemon.credentials import secret_path

FOLDER = Path("/etc/sailor")


def test_without_systemd_names_are_relative_to_the_configuration(monkeypatch):
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert secret_path("cluster.key", FOLDER) == FOLDER / "cluster.key"
    assert secret_path("/root/key", FOLDER) == Path("/root/key")


def test_a_credential_comes_before_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert secret_path("cluster.key", FOLDER) == FOLDER / "cluster.key"
    (tmp_path / "cluster.key").touch()
    assert secret_path("cluster.key", FOLDER) == tmp_path / "cluster.key"
    for path in ("./cluster.key", "keys/cluster.key", "/root/cluster.key"):
        assert secret_path(path, FOLDER) == FOLDER / path
