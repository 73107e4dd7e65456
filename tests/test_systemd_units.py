"""The tree that `make install DESTDIR=…` lays out: systemd finds nothing to say about it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agents.config import load_config as load_agent
from sailord.config import load_config
from tests.sailord.daemon.running import ROOT

UNITS = ("sailord.service", "sailor-agent.service")
EXPOSURE_MOST = {"sailord.service": 2.0, "sailor-agent.service": 3.0}
"""Of 10, as `systemd-analyze security` counts."""
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze"
)


def lay_out(tree: Path, *options: str) -> None:
    script = ROOT / "scripts" / "system.py"
    subprocess.run([sys.executable, script, tree, *options], check=True, capture_output=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    lay_out(folder, "--files-only")
    return folder


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False
    )


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_every_unit(tree, unit):
    done = analyze("verify", "--man=no", f"--root={tree}", unit)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_systemd_rejects_a_wrong_unit(tree, tmp_path):
    """It answers 0 to unknown keys: what it writes is what counts."""
    shutil.copytree(tree, tmp_path / "tree")
    unit = tmp_path / "tree" / "usr/lib/systemd/system/sailord.service"
    unit.write_text(unit.read_text() + "Colour=blue\n")
    (tmp_path / "tree" / "usr/bin/sailor-agent").unlink()
    root = f"--root={tmp_path / 'tree'}"
    assert "Colour" in analyze("verify", "--man=no", root, UNITS[0]).stderr
    assert "sailor-agent" in analyze("verify", "--man=no", root, UNITS[1]).stderr


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_units_are_sandboxed(tree, unit):
    said = analyze("security", "--no-pager", "--offline=yes", f"--root={tree}", unit).stdout
    overall = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert overall is not None
    assert float(overall[1]) <= EXPOSURE_MOST[unit]


def settings(tree: Path, unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (tree / "usr/lib/systemd/system" / unit).read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_watched_and_stopped_as_its_service_expects(tree, unit):
    found = settings(tree, unit)
    assert found["Type"] == ["notify"]
    # It holds for the service alone: what runs before it would be tried again for ever.
    assert found["RestartPreventExitStatus"] == ["2"]
    assert "ExecStartPre" not in found
    assert float(found["WatchdogSec"][0]) > 10
    # A shutdown must stop the agent before it stops the network.
    assert "shutdown.target" in found["Conflicts"][0] + found["Before"][0]
    assert "network-online.target" in found["After"][0]
    assert found["ExecStart"][0].partition(" ")[0].startswith("/usr/bin/")
    assert (tree / found["ExecStart"][0].partition(" ")[0][1:]).stat().st_mode & 0o111


def test_workers_outlive_their_agent(tree):
    found = settings(tree, "sailor-agent.service")
    assert found["KillMode"] == ["process"]  # Signals to the agent do not reach its workers.
    assert found["RestartKillSignal"] == ["SIGINT"]  # A restart is no drain.
    assert found["TimeoutStartFailureMode"] == ["kill"]  # Nor is a start that hangs.
    assert found["RuntimeDirectoryPreserve"] == ["yes"]  # What they hold in memory stays.
    assert found["OOMPolicy"] == ["continue"]
    # They would hide the devices, or end a folder that workers use.
    assert not {"PrivateTmp", "PrivateDevices", "ProtectClock", "RemoveIPC"} & set(found)
    memory = load_agent(tree / "etc/sailor/agent.toml").memory
    assert memory is not None
    assert memory.parent == Path("/run", *found["RuntimeDirectory"])
    assert settings(tree, "sailord.service")["KillMode"] == ["mixed"]  # Its planners end with it.
    assert "RemoveIPC" not in settings(tree, "sailord.service")  # It may be the same user's.


def test_example_files_are_valid_and_never_overwritten(tree):
    key = tree / "etc/sailor/cluster.key"
    key.write_text("k" * 64)
    sailord = load_config(tree / "etc/sailor/sailord.toml")
    agent = load_agent(tree / "etc/sailor/agent.toml")
    assert sailord.cluster_name == agent.cluster_name
    assert agent.store == f"unix://{sailord.store_socket}"
    assert agent.key.resolve() == sailord.key.resolve()
    own = tree / "etc/sailor/agent.toml"
    example = own.read_text(encoding="utf-8")
    own.write_text(example + "spot = true\n", encoding="utf-8")
    try:
        lay_out(tree, "--files-only")
        assert own.read_text().endswith("spot = true\n")
    finally:  # Other tests read the same tree.
        own.write_text(example, encoding="utf-8")
        key.unlink()


def test_documents_are_installed_together_and_named_by_the_units(tree):
    folder = tree / "usr/share/doc/sailor"
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {
        p.name for p in folder.iterdir()
    }
    for page in folder.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            # What lies outside docs/ stands in the checkout alone.
            if not os.path.relpath(page.parent / link, folder).startswith(".."):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
    for unit in UNITS:
        (document,) = settings(tree, unit)["Documentation"]
        assert (tree / document.removeprefix("file:/")).is_file()
    for name in ("sailord.toml", "agent.toml"):
        text = (tree / "etc/sailor" / name).read_text()
        (named,) = re.findall(r"/(usr/share/doc/\S+\.md)", text)
        assert (tree / named).is_file()


@pytest.mark.slow
@pytest.mark.skipif("SAILOR_EXAMPLES" not in os.environ, reason="it fetches all packages anew")
def test_the_environment_can_be_moved(tmp_path):
    lay_out(tmp_path / "tree")
    moved = tmp_path / "moved"
    (tmp_path / "tree" / "opt" / "sailor").rename(moved)
    for text in (moved / "bin").glob("sailor*"):
        said = text.read_text()
        assert ("/opt/sailor/bin/python" in said, str(tmp_path) in said) == (True, False)
    for module in ("sailord.main", "agents.main", "sailord.cli.main"):
        code = f"from {module} import main; main()"
        command = [moved / "bin" / "python", "-P", "-c", code, "--version"]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        assert "0.1.0" in done.stdout, done.stderr
