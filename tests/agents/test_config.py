"""The agent's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from agents.config import GPU_ABORT_S, load_config
from agents.core.model import Options
from agents.main import main
from simulator.documents.problems import InputError


def written(folder: Path, text: str) -> Path:
    path = folder / "agent.toml"
    path.write_text(
        'cluster_name = "c"\nname = "a"\nstate = "state"\nkey = "key"\n'
        f'store = "unix://{folder}/store.sock"\n{text}'
    )
    return path


def test_abort_takes_longer_on_gpus(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, ""))
    assert config.options_on(is_emulated=False).abort_s == GPU_ABORT_S
    assert config.options_on(is_emulated=True).abort_s == Options().abort_s


def test_a_key_of_an_earlier_version_is_accepted_and_named(tmp_path: Path) -> None:
    keys = ("abort_s", "kill_s", "nap_s", "needed_s", "park_s", "report_every_s", "short_s")
    old = "\n".join(["[options]", *(f"{key} = 5.0" for key in keys)])
    path = written(tmp_path, f"{old}\n[options.testing]\npark_s = 2.0\n")
    config = load_config(path)
    assert config.options == Options(park_s=2.0)
    assert sorted(config.unread) == [f"agent.toml: [options] {key}" for key in keys]
    said = CliRunner().invoke(main, ["check", "--config", str(path)]).output
    assert all(f"warning: {place} is no longer read\n" in said for place in config.unread)


def test_a_store_that_sailord_alone_opens_is_refused(tmp_path: Path) -> None:
    """The agent would be `ready` in a store of its own, where no sailord looks."""
    path = written(tmp_path, "")
    path.write_text(path.read_text().replace("unix://", "embedded://"))
    with pytest.raises(InputError, match="sailord alone opens; give its socket: unix:///"):
        load_config(path)
