"""When ``make`` keeps the virtual environment that is there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
install = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(install)

NOW = sys.version_info[:2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    venv = tmp_path_factory.mktemp("checkout") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    return venv


def test_an_environment_that_was_made_here_is_kept(made):
    assert install.is_made_for(made, NOW)


def test_one_that_was_copied_with_its_checkout_is_made_anew(made, tmp_path):
    """Its commands begin with the path of the Python of the other checkout."""
    shutil.copytree(made, tmp_path / ".venv", symlinks=True)
    assert not install.is_made_for(tmp_path / ".venv", NOW)


def test_one_of_another_python_is_made_anew(made):
    assert not install.is_made_for(made, (NOW[0], NOW[1] + 1))


def test_one_without_its_configuration_is_made_anew(tmp_path):
    assert not install.is_made_for(tmp_path, NOW)


def test_the_stamps_of_a_copied_checkout_do_not_count(tmp_path):
    """So that ``make`` looks at the environment at all."""
    asked = []
    for name in ("here", "copied"):
        place = tmp_path / name
        (place / "scripts").mkdir(parents=True)
        for each in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/install.py"):
            shutil.copy(ROOT / each, place / each)
        command = ["make", "-n", "plan-tour", f"PYTHON={sys.executable}"]
        said = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
        # `make test` makes this a make below another one, which says more.
        asked += re.findall(r"scripts/install.py \.venv/\.installed-plan-(\w+)", said.stdout)
    assert len(set(asked)) == 2
