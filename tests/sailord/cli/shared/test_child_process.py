"""A command whose child was killed says so, and the child gets the options as they were given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sailord.cli.main import main
from tests.sailord.checkpoints.made import SPEC, chain


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program that runs instead of Python."""
    path = tmp_path / "child"
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def run(child: Path, does: str, *words: str) -> Result:
    child.write_text(f"#!/bin/sh\n{does}\n")
    child.chmod(0o755)
    job = child.with_name("job.toml")
    job.touch()
    return CliRunner().invoke(main, ["profile", "model", *words, str(job)])


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        ("kill -9 $$", 1, "was killed by signal 9 (often: out of memory)"),
        ("kill -2 $$", 130, ""),
        ("exit 3", 3, ""),
        ("exit 0", 0, ""),
    ],
)
def test_the_end_of_a_child_is_explained(child: Path, does: str, code: int, said: str) -> None:
    done = run(child, does)
    assert done.exit_code == code
    assert said in done.output
    assert bool(said) == bool(done.output)


def test_a_killed_conversion_of_a_checkpoint_is_reported(child: Path, tmp_path: Path) -> None:
    kept, job = tmp_path / "kept", tmp_path / "job.toml"
    chain(kept, 10)
    job.write_text(f'{SPEC}\n[checkpoint]\nuri = "file://{kept}"\n')
    child.write_text("#!/bin/sh\nkill -9 $$\n")
    child.chmod(0o755)
    for words in (
        ("export", "j", "--at", f"file://{kept}", "--to", str(tmp_path / "out")),
        ("import", str(kept), "--job", str(job), "--name", "x"),
    ):
        done = CliRunner().invoke(main, ["checkpoint", *words])
        assert done.exit_code == 1, done.output
        assert "was killed by signal 9 (often: out of memory)" in done.output


def test_options_of_a_profile_reach_its_process(child: Path) -> None:
    told = child.with_name("told")
    assert run(child, f'echo "$@" > {told}', "--threads", "1", "--budget", "2").exit_code == 0
    assert "--threads 1" in told.read_text()
    assert "--budget 2.0" in told.read_text()
    assert "--force" not in told.read_text()
    for option in ("--threads", "--budget"):
        done = run(child, "exit 0", option, "0")
        assert done.exit_code == 2
        assert option in done.output
