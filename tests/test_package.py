"""The built wheel works alone: in an environment of its own, outside the checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("agents", "planner", "sailor", "sailord", "simulator", "worker")


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _sources() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and path.suffix in ("", ".toml", ".md"):
            shutil.copy(path, source)
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    _run(*build, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and the dependencies that it declares, no others."""
    folder = tmp_path_factory.mktemp("clean")
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    # Needs no network: pip installs the wheel alone, and what it declares is linked.
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    _run(*pip, "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    site = _run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder)
    for name in _declared(wheel):
        _link(name, Path(site.strip()))
    return folder


def _declared(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    prefix = "Requires-Dist: "
    wanted = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    names: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        name = canonicalize_name(requirement.name)
        if applies and name not in names:
            names.add(name)
            wanted += distribution(requirement.name).requires or []
    return names


def _link(name: str, site: Path) -> None:
    here = Path(sysconfig.get_paths()["purelib"])
    for entry in {file.parts[0] for file in distribution(name).files or ()}:
        if entry not in ("..", "__pycache__"):
            (site / entry).symlink_to(here / entry)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    missing = _sources() - held
    assert not missing, f"list its package, or its suffix, in pyproject.toml: {sorted(missing)}"
    assert not held - _sources()


@pytest.mark.slow
def test_every_module_imports_from_the_wheel_alone(clean):
    names = [
        source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for source in sorted(_sources())
        if source.endswith(".py")
        # The rest of worker may need the group of dependencies of that name.
        and (not source.startswith("worker/") or source == "worker/__init__.py")
    ]
    code = (
        "import importlib, json, sys\n"
        f"found = [importlib.import_module(name).__file__ for name in {names!r}]\n"
        "print(json.dumps(found))"
    )
    python = clean / "venv" / "bin" / "python"
    found = json.loads(_run(python, "-I", "-W", "error", "-c", code, cwd=clean))
    assert len(found) >= len(PACKAGES)
    assert [file for file in found if not Path(file).is_relative_to(clean)] == []


@pytest.mark.slow
def test_the_command_prints_its_version(clean):
    told = _run(clean / "venv" / "bin" / "sailorctl", "--version", cwd=clean)
    assert told == f"sailorctl, version {version('sailor')}\n"


@pytest.mark.slow
def test_the_command_runs_without_the_optional_groups(clean):
    assert "Usage: sailorctl" in _run(clean / "venv" / "bin" / "sailorctl", "--help", cwd=clean)


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"]]
    for group in project["optional-dependencies"].values():
        asked += group
    pins = {
        line.partition("==")[0]: line.partition("==")[2]
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    }
    names = {Requirement(requirement).name for requirement in asked} - {"sailor"}
    assert names - set(pins) == set()
    installed = {name: version(name).partition("+")[0] for name in names}
    assert installed == {name: pins[name] for name in names}, "run `make install`"
