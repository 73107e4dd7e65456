"""All mistakes in sailord's configuration are told at once, before anything starts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sailord.config import load_config
from sailord.main import main
from simulator.documents.problems import InputError


def test_all_mistakes_are_reported_at_once(tmp_path):
    (tmp_path / "short").write_text("abc")
    file = tmp_path / "sailord.toml"
    file.write_text(
        'cluster_name = "Not A Name"\nstate = "s"\ncluster = "none.toml"\nstore = "ftp://x"\n'
        'unknown = 1\n[listen]\nport = 99999\ntoken_file = "short"\n'
        '[options]\nlease_s = -1\n[[webhooks.receiver]]\nurl = "nowhere"\n'
    )
    with pytest.raises(InputError) as told:
        load_config(file)
    text = str(told.value)
    for word in ("cluster_name", "key", "none.toml", "unknown scheme", "unknown", "port",
                 "token_file", "lease_s", "url", "secret_file"):  # fmt: skip
        assert word in text, text
    done = CliRunner().invoke(main, ["check", "--config", str(file)])
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_check_reports_missing_files(place):
    said = CliRunner().invoke(main, ["check", "--config", str(place.config)])
    assert said.exit_code == 0
    place.key.write_text("short")
    text = place.config.read_text()
    way = "etcd://h?user=a&password_file=/none&ca=/neither"
    place.config.write_text(f'store = "{way}"\n{text}')
    said = CliRunner().invoke(main, ["check", "--config", str(place.config)])
    assert said.exit_code == 2
    for words in ("the cluster's key has 5 bytes", "its password_file, /none, cannot be read",
                  "its ca, /neither, cannot be read"):  # fmt: skip
        assert words in said.output


def test_a_second_sailord_on_the_same_folder_is_refused(place):
    assert CliRunner().invoke(main, ["check", "--config", str(place.config)]).exit_code == 0
    from sailord.controller.election import lock_state_folder  # noqa: PLC0415 - the lock is taken in this process

    taken = lock_state_folder(place.folder / "x")
    with pytest.raises(InputError, match="another sailord"):
        lock_state_folder(place.folder / "x")
    assert len(taken.id) == 32
