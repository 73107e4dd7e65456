"""A script that runs beside modules with names of Sailor's packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sailord.cli.shared.described_job import JobFile
from simulator.documents.problems import InputError
from worker.script.load import load_script


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("from worker import own\n")
    (tmp_path / "worker.py").write_text("own = 1\n")
    return tmp_path


def test_a_module_of_the_script_with_the_name_of_a_package_of_sailor_is_named(folder):
    with pytest.raises(InputError, match="rename your worker: Sailor has a package of that name"):
        load_script(folder / "train.py")


@pytest.mark.slow
def test_such_a_module_is_named_when_the_script_runs_alone(folder):
    (folder / "train.py").write_text("import sailor\n")
    words = [sys.executable, str(folder / "train.py")]
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=folder)
    said = "ImportError: a module of yours, worker, hides the package of Sailor with that name"
    assert said in done.stderr


@pytest.mark.slow
def test_such_a_module_in_the_present_folder_does_not_take_the_place_of_ours(folder, monkeypatch):
    (folder / "train.py").write_text("import sailor\n")
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=r"train.py: does not call train\(\)"):
        JobFile(folder / "train.py").text()
