"""Compiled extensions: whose folder, and what becomes of locks that nobody holds any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.engines.deepspeed.build_ops import claimed

PLACE = "TORCH_EXTENSIONS_DIR"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of extensions in which a build was killed."""
    monkeypatch.delenv(PLACE, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin")
    (tmp_path / "fused_adam").mkdir()
    (tmp_path / "fused_adam" / "lock").touch()
    return tmp_path


def test_a_lock_that_a_killed_build_left_is_removed(folder):
    with claimed(folder):
        assert os.environ[PLACE] == str(folder)
        assert not (folder / "fused_adam" / "lock").exists()
    assert PLACE not in os.environ


def test_a_lock_stays_while_another_run_may_hold_it(folder):
    with claimed(folder):
        # As if this run were building now.
        (folder / "fused_adam" / "lock").touch()
        enter = "import pathlib, sys; from worker.engines.deepspeed.build_ops import claimed\n"
        enter += "with claimed(pathlib.Path(sys.argv[1])): pass"
        root = Path(__file__).resolve().parents[3]
        environment = {key: value for key, value in os.environ.items() if key != PLACE}
        command = [sys.executable, "-c", enter, str(folder)]
        subprocess.run(command, cwd=root, env=environment, check=True)
        assert (folder / "fused_adam" / "lock").exists()


def test_a_place_that_the_user_names_is_left_alone(folder, monkeypatch):
    monkeypatch.setenv(PLACE, "/elsewhere")
    with claimed(folder):
        assert os.environ[PLACE] == "/elsewhere"
        assert (folder / "fused_adam" / "lock").exists()


def test_a_folder_that_cannot_be_made_is_no_reason_to_stop(folder):
    (folder / "file").touch()
    with claimed(folder / "file" / "below"):
        assert PLACE not in os.environ


def test_the_tools_beside_python_are_found(folder):
    with claimed(folder):
        assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
