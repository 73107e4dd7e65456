"""The tree that `make install DESTDIR=…` lays out passes systemd's own checks."""

from __future__ import annotations

import importlib
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
WORKERS = "sailor-worker.service"
EXPOSURE_MOST = {"sailord.service": 1.5, "sailor-agent.service": 2.5, WORKERS: 2.5}
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


def test_users_of_the_units_can_read_what_root_installs_with_a_strict_umask(tmp_path):
    script = ROOT / "scripts" / "system.py"
    subprocess.run([sys.executable, script, tmp_path, "--files-only"], check=True, umask=0o077)
    folders = [each for each in tmp_path.rglob("*") if each.is_dir() and not each.is_symlink()]
    assert len(folders) > 5
    closed = [each for each in folders if each.stat().st_mode & 0o005 != 0o005]
    assert closed == []


def test_a_destination_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, ROOT / "scripts" / "system.py", tmp_path / "file" / "tree"]
    done = subprocess.run([*command, "--files-only"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch("error: .*Not a directory.*\n", done.stderr)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False
    )


@needs_systemd
@pytest.mark.parametrize("unit", [*UNITS, WORKERS])
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
@pytest.mark.parametrize("unit", [*UNITS, WORKERS])
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
    # It holds for the service alone: what runs before it would be tried again and again.
    assert "2" in found["RestartPreventExitStatus"][0].split()
    assert "ExecStartPre" not in found
    assert float(found["WatchdogSec"][0]) > 10
    # A shutdown must stop the agent before it stops the network.
    assert "shutdown.target" in found["Conflicts"][0] + found["Before"][0]
    assert "network-online.target" in found["After"][0]
    assert found["ExecStart"][0].partition(" ")[0].startswith("/usr/bin/")
    assert (tree / found["ExecStart"][0].partition(" ")[0][1:]).stat().st_mode & 0o111


@pytest.mark.parametrize("unit", [*UNITS, WORKERS])
def test_slowest_crash_loop_makes_the_unit_failed(tree, unit):
    """Each start takes its timeout, hangs until the watchdog acts, and takes the stop timeout."""
    found = settings(tree, unit)
    assert found["OnFailure"] == ["sailor-failed@%n.service"]
    keys = ("TimeoutStartSec", "WatchdogSec", "TimeoutStopSec", "RestartSec")
    slowest_s = sum(float(found[key][0]) for key in keys)
    burst, within_s = int(found["StartLimitBurst"][0]), float(found["StartLimitIntervalSec"][0])
    assert burst * slowest_s < within_s
    # A service that hangs at each start becomes `failed` within half an hour.
    assert unit == WORKERS or burst * (float(found["WatchdogSec"][0]) + 5) < 1800


def test_workers_outlive_their_agent(tree):
    found = settings(tree, "sailor-agent.service")
    assert found["KillMode"] == ["process"]  # Signals to the agent do not reach its workers.
    assert found["RestartKillSignal"] == ["SIGINT"]  # A restart is no drain.
    assert found["TimeoutStartFailureMode"] == ["kill"]  # Nor is a start that hangs.
    assert found["RuntimeDirectoryPreserve"] == ["yes"]  # What they hold in memory stays.
    assert found["OOMPolicy"] == ["continue"]
    # They would hide the devices, or end a folder that workers use.
    assert not {"PrivateTmp", "PrivateDevices", "ProtectClock", "RemoveIPC"} & set(found)
    assert settings(tree, "sailord.service")["KillMode"] == ["mixed"]  # Its planners end with it.
    assert "RemoveIPC" not in settings(tree, "sailord.service")  # It may be the same user's.


def test_workers_have_a_user_of_their_own_that_reads_no_secret(tree):
    found, agents = settings(tree, WORKERS), settings(tree, "sailor-agent.service")
    config = load_agent(tree / "etc/sailor/agent.toml")
    assert config.worker_folder is not None
    assert config.memory is not None
    assert found["User"] != agents["User"]
    assert found["Group"] == agents["Group"]  # What the agent writes for them is their group's.
    made = " ".join(found["ExecStartPre"])
    assert f" {config.worker_folder} {config.memory.parent}" in made
    assert f" {config.worker_folder}/fork" in made
    users = (tree / "usr/lib/sysusers.d/sailor.conf").read_text()
    assert all(f"u {user} " in users for user in (*found["User"], *agents["User"]))
    closed = " ".join(found["InaccessiblePaths"]).replace("-/", "/").split()
    # What is missing when ExecStart begins stays readable: systemd passes over it.
    first = found["ExecStartPre"][0].replace(";", " ").replace("'", " ").split()
    assert {each for each in closed if not each.startswith("/etc/")} <= set(first)
    secret = [f"/var/lib/{each}" for each in ("sailor", *agents["StateDirectory"])]
    assert {*secret, "/etc/credstore", "/run/credentials", "/run/sailor"} <= set(closed)
    assert "169.254.169.254/32" in found["IPAddressDeny"][0].split()
    assert found["KillMode"] == ["control-group"]  # The agent cannot end what it does not own.
    assert any(WORKERS in line.split() for line in agents["After"])
    assert "PartOf" not in found  # A restart of the agent leaves workers alone.


def test_agent_ends_by_itself_before_systemd_kills_it(tree):
    found = settings(tree, "sailor-agent.service")
    key = tree / "etc/sailor/cluster.key"
    agent = load_agent(tree / "etc/sailor/agent.toml")
    assert not key.exists()  # It is not read.
    assert agent.drain_s + 20 < float(found["TimeoutStopSec"][0])
    (told,) = found["ExecStop"]
    assert (tree / told.removeprefix("+-/").partition(" ")[0]).stat().st_mode & 0o111
    # What stops after it still answers it at a shutdown.
    assert any("sailord.service" in line.split() for line in found["After"])


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_takes_secrets_that_root_alone_can_read(tree, unit, tmp_path, monkeypatch):
    """The names in its example file are those of its credentials."""
    loaded = [each.partition(":") for each in settings(tree, unit)["LoadCredential"]]
    assert all(source.startswith("sailor.") and "/" not in source for _, _, source in loaded)
    for name, _, _ in loaded:
        (tmp_path / name).write_text("credential " * 8)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    if unit == "sailord.service":
        config = tree / "etc/sailor/sailord.toml"
        own = config.read_text()
        config.write_text(own + 'token_file = "token"\n')
        try:
            read = load_config(config)
        finally:
            config.write_text(own)
        assert read.token == ("credential " * 8).strip().encode()
        assert read.key == tmp_path / "cluster.key"
    else:
        assert load_agent(tree / "etc/sailor/agent.toml").key == tmp_path / "cluster.key"


def test_example_files_are_valid_and_never_overwritten(tree):
    key = tree / "etc/sailor/cluster.key"
    key.write_text("k" * 64)
    key.chmod(0o600)
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


def sailor_system(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "installed.py"
    command = [sys.executable, script, "--root", tree, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def listing(tree: Path) -> set[str]:
    return {str(path.relative_to(tree)) for path in tree.rglob("*")}


@pytest.fixture
def two_versions(tmp_path):
    """A tree in which a second version is in use; its own file tells it apart."""
    tree = tmp_path / "tree"
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/other").touch()
    lay_out(tree, "--files-only")
    versions = tree / "opt/sailor/versions"
    (first,) = versions.iterdir()
    second = versions / "9.9.9-second"
    shutil.copytree(first, second)
    (second / "system/usr/bin/sailord").write_text("#!/bin/sh\necho second\n")
    (second / "system/usr/lib/sailor/new").touch()
    (second / "system/usr/bin/sailorctl").unlink()
    assert sailor_system(tree, "use", second.name).returncode == 0
    return tree, first.name, second.name


def test_versions_are_switched_and_rolled_back(two_versions):
    tree, first, second = two_versions
    assert os.readlink(tree / "opt/sailor/current") == f"versions/{second}"
    assert "second" in (tree / "usr/bin/sailord").read_text()
    assert not (tree / "usr/bin/sailorctl").exists()
    said = sailor_system(tree, "versions").stdout
    assert f"{first}  previous" in said
    assert f"{second}  current" in said
    assert sailor_system(tree, "rollback").returncode == 0
    assert os.readlink(tree / "opt/sailor/current") == f"versions/{first}"
    assert "current/bin/sailord" in (tree / "usr/bin/sailord").read_text()
    assert (tree / "usr/bin/sailorctl").exists()
    assert not (tree / "usr/lib/sailor/new").exists()


def test_a_version_must_be_installed_to_be_used(two_versions):
    tree, _, _ = two_versions
    assert "is not installed; installed are" in sailor_system(tree, "use", "0.0.0").stderr


def test_versions_that_nothing_uses_are_pruned(two_versions):
    tree, first, second = two_versions
    versions = tree / "opt/sailor/versions"
    for name in ("0.0.1-old", "0.0.2-busy"):
        (versions / name).mkdir()
    sleeper = versions / "0.0.2-busy/sleep"
    sleeper.symlink_to(shutil.which("sleep"))
    with subprocess.Popen([sleeper, "60"]) as busy:
        try:
            said = sailor_system(tree, "prune").stdout
        finally:
            busy.kill()
    assert said == f"0.0.1-old is deleted\n0.0.2-busy stays: process {busy.pid} uses it\n"
    assert {each.name for each in versions.iterdir()} == {first, second, "0.0.2-busy"}


def test_uninstalling_leaves_what_is_the_operators_and_purging_nothing(two_versions):
    tree, _, _ = two_versions
    (tree / "var/lib/sailor").mkdir(parents=True)
    (tree / "etc/sailor/cluster.key").write_text("k" * 64)
    (tree / "etc/sailor/agent.toml").write_text("# mine\n")
    (tree / "etc/credstore").mkdir()
    for name in ("sailor.token", "other"):
        (tree / "etc/credstore" / name).touch()
    said = sailor_system(tree, "uninstall")
    assert "what stays: /etc/sailor, /var/lib/sailor (make uninstall PURGE=1)" in said.stdout
    files = {each for each in listing(tree) if not (tree / each).is_dir()}
    own = {each for each in files if each.startswith("etc/sailor/")}
    assert {"etc/sailor/cluster.key", "etc/sailor/agent.toml", "etc/sailor/sailord.toml"} <= own
    assert files - own == {"usr/bin/other", "etc/credstore/sailor.token", "etc/credstore/other"}
    assert sailor_system(tree, "uninstall", "--purge").returncode == 0
    left = {each for each in listing(tree) if not (tree / each).is_dir()}
    assert left == {"usr/bin/other", "etc/credstore/other"}
    assert not (tree / "etc/sailor").exists()
    assert not (tree / "opt/sailor").exists()


def test_an_interpreter_that_the_service_cannot_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    system = importlib.import_module("system")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    python = closed / "python3"
    python.touch()
    assert "is closed to them" in system.interpreter_problem(str(python))
    assert "PYTHON=/usr/bin/python3" in system.interpreter_problem(str(python))
    monkeypatch.setattr(system, "HOMES", (str(tmp_path),))
    assert "is below a home" in system.interpreter_problem(str(python))


@pytest.mark.at_length
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="the system has no Python")
def test_the_environment_can_be_moved_and_needs_no_torch(tmp_path):
    tree = tmp_path / "tree"
    script = ROOT / "scripts" / "system.py"
    subprocess.run(["/usr/bin/python3", script, tree], check=True, capture_output=True)
    (version,) = (tree / "opt/sailor/versions").iterdir()
    moved = tmp_path / "moved"
    version.rename(moved)
    for text in (moved / "bin").glob("sailor*"):
        said = text.read_text()
        assert (f"/opt/sailor/versions/{version.name}/bin" in said, str(tmp_path) in said) == (
            True,
            False,
        )
    for module in ("sailord.main", "agents.main", "sailord.cli.main"):
        code = f"from {module} import main; main()"
        command = [moved / "bin" / "python", "-P", "-c", code, "--version"]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        assert "0.1.0" in done.stdout, done.stderr
    assert not list(moved.rglob("torch"))
