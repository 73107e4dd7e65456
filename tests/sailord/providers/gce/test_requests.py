"""Request bodies, the startup script, and GKE's manifest."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.config import load_config
from agents.daemon.allowed_uris import MOUNTS
from agents.service import ALONE
from sailord.providers.gce.config import PACKAGE, machine_shape
from sailord.providers.gce.requests import TORCH, bulk_insert_body, instance_names, startup_script
from sailord.providers.interface import Pool
from tests.gce.cloud import HERE, ask, config, pool

ROOT = Path(__file__).resolve().parents[4]


def test_attached_gpus_are_requested_as_accelerators():
    assert machine_shape("n1-standard-16-v100-2") == ("n1-standard-16", "nvidia-tesla-v100", 2)
    assert machine_shape("a2-highgpu-2g") == ("a2-highgpu-2g", "", 0)
    v100 = Pool(HERE, "n1-standard-16-v100-2", "V100-16", 2, True)
    properties = bulk_insert_body(ask(1, of=v100), config(""))["instance_properties"]
    assert properties["machine_type"] == "n1-standard-16"
    assert properties["guest_accelerators"] == [
        {"accelerator_type": "nvidia-tesla-v100", "accelerator_count": 2}
    ]


def test_on_demand_instances_of_a_pool_may_be_made_in_a_reservation():
    usual, settled = pool(spot=False), replace(config(""), reservations={pool(spot=False): "mine"})
    assert bulk_insert_body(ask(1, of=usual), settled)["instance_properties"][
        "reservation_affinity"
    ] == {
        "consume_reservation_type": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": ["mine"],
    }
    spot = bulk_insert_body(ask(1), settled)["instance_properties"]
    assert "reservation_affinity" not in spot


def test_a_bulk_insert_names_instances_by_keys():
    asked = bulk_insert_body(ask(2), config(""))
    assert asked["per_instance_properties"] == {name: {} for name in instance_names(ask(2), "prod")}


def test_instance_names_are_a_function_of_the_request():
    many = [name for number in range(50) for name in instance_names(ask(16, number=number), "prod")]
    assert len(set(many)) == 50 * 16
    assert instance_names(ask(16), "prod") == instance_names(ask(16), "prod")
    (longest,) = instance_names(ask(1), "a" * 64)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in (*many, longest))


# ---- the script ---------------------------------------------------------------------------------


def script() -> str:
    return startup_script(pool(), config(""))


def heredoc(after: str) -> str:
    found = re.search(rf"{re.escape(after)} <<'?END'?\n(.*?)\nEND\n", script(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_startup_script_is_valid_bash_without_the_key():
    done = subprocess.run(["bash", "-n"], input=script(), text=True, check=False)
    assert done.returncode == 0
    assert "secretmanager.googleapis.com/v1/projects/test-project/secrets/key" in script()
    assert f"'{TORCH}'" in script()
    assert TORCH in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"python3": "old"}, "this image has no Python 3.11 or later"),
        ({}, "this image has no Python 3.11 or later"),
        ({"python3": "good", "python3.12": "good", "python3.11": "good"}, "python3.12"),
        ({"python3": "good", "python3.12": "bare", "python3.11": "old"}, "python3"),
        ({"python3": "bare"}, "install python3-venv"),
        ({"python3.12": "bare", "apt-get": "good"}, "python3.12"),
    ],
)
def test_the_startup_script_finds_a_suitable_python_or_says_why_not(tmp_path: Path, there, said):
    """A Python is ``old``, ``bare`` (it makes no environments) or ``good``."""
    does = {
        "old": "exit 1",
        "bare": f'[[ $2 != *ensurepip* || -e "{tmp_path}/venv" ]]',
        "good": f'[[ $0 != *apt-get ]] || touch "{tmp_path}/venv"',
    }
    for name, kind in there.items():
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{does[kind]}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "touch").symlink_to(shutil.which("touch") or "")
    before, found, _ = script().partition("# Pinned, so a second boot installs nothing.")
    assert found
    done = subprocess.run(
        [shutil.which("bash") or "", "-c", f"{before}\npython=$(find_python)\necho it is $python"],
        env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    is_found = said.startswith("python")
    assert done.returncode == (0 if is_found else 1)
    assert (done.stdout == f"it is {said}\n") if is_found else (said in done.stderr)


@pytest.mark.parametrize(
    ("active", "age_s", "ends"),
    [(True, 86_400, False), (False, 60, False), (False, 4 * 3600 + 60, True)],
)
def test_an_instance_without_an_agent_for_long_powers_off_whatever_failed(
    tmp_path, active, age_s, ends
):
    """The timer is the first that the script makes; its check runs here as the timer runs it."""
    head, _, rest = script().partition("set -euo pipefail\n")
    assert rest
    assert [line for line in head.splitlines() if not line.startswith("#")][1].startswith("touch")
    bash = shutil.which("bash")
    systemctl = f"""#!{bash}
case "$1" in
    is-active) exit {0 if active else 3};;
    poweroff) touch {tmp_path}/off;;
esac
"""
    for name, does in (
        ("systemd-run", f'#!{bash}\nprintf "%s\\n" "$@" | head -4 >{tmp_path}/timer\n'
                        f'printf %s "${{@: -1}}" >{tmp_path}/check\n'),
        ("systemctl", systemctl),
    ):  # fmt: skip
        (tmp_path / name).write_text(does)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    head = head.replace("/run/", f"{tmp_path}/")
    subprocess.run(["bash", "-c", head], check=True, env=environment)
    timer = (tmp_path / "timer").read_text().split()
    assert {"--on-active=60", "--on-unit-active=60"} < set(timer)
    alive, old = tmp_path / "sailor-alive", time.time() - age_s
    os.utime(alive, (old, old))
    subprocess.run(["sh", tmp_path / "check"], check=False, env=environment)
    assert (tmp_path / "off").exists() == ends
    assert (alive.stat().st_mtime > old + 1) == active


@pytest.mark.parametrize(("alone_s", "minutes"), [(60, 30), (7200, 120)])
def test_a_first_boot_has_time_to_install(alone_s, minutes):
    text = startup_script(pool(), replace(config(""), alone_s=alone_s))
    assert f"-mmin -{minutes})" in text


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_wheel_in_a_bucket_is_fetched_with_the_instances_account_and_checked(tmp_path, is_whole):
    content = b"a wheel" if is_whole else b"another"
    curl = f"""#!{shutil.which("bash")}
echo "$@" >> {tmp_path}/asked
case "$*" in
    *service-accounts*) echo '{{"access_token": "token-of-the-account"}}';;
    *' -o '*) printf '{content.decode()}' > "${{@: -2:1}}";;
esac
"""
    (tmp_path / "curl").write_text(curl)
    (tmp_path / "curl").chmod(0o755)
    name = "sailor-0.1.0-py3-none-any.whl"
    package = f"sailor[worker]@gs://bucket/a/{name}#sha256={hashlib.sha256(b'a wheel').hexdigest()}"
    assert PACKAGE.match(package)
    before, _, _ = script().partition("# Pinned, so a second boot installs nothing.")
    done = subprocess.run(
        ["bash", "-c", f"{before}\nfound=$(fetch_wheel '{package}' '{tmp_path}')\necho $found"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == is_whole, done.stderr
    if is_whole:
        assert done.stdout == f"sailor[worker]@file://{tmp_path}/{name}\n"
    asked = (tmp_path / "asked").read_text()
    assert "Bearer token-of-the-account" in asked
    assert f"https://storage.googleapis.com/bucket/a/{name}" in asked


def agent_file(text: str) -> str:
    found = re.search(r"agent.toml <<END\n(.*?)\nEND\n", text, re.DOTALL)
    assert found is not None
    return found[1]


def test_an_agent_file_with_default_mounts_suits_the_previous_version():
    """An agent refuses a section that it does not know."""
    assert "mounts" not in agent_file(script())
    assert "\n[mounts]\n" in agent_file(startup_script(pool(), replace(config(""), mounts=())))


@pytest.mark.parametrize("spot", [True, False])
@pytest.mark.parametrize("mounts", [None, ("gs://data/",), ()])
def test_the_startup_script_writes_a_valid_agent_file(tmp_path: Path, spot, mounts):
    text = startup_script(pool(spot=spot), replace(config(""), mounts=mounts))
    told = agent_file(text).replace("${zone##*/}", HERE)
    told = told.replace("$(metadata name)", "sailor-prod-1")
    told = told.replace("$(metadata network-interfaces/0/ip)", "10.0.0.7")
    path = tmp_path / "agent.toml"
    path.write_text(told)
    agent = load_config(path)
    assert (agent.name, agent.zone, agent.machine) == ("sailor-prod-1", HERE, "a2-highgpu-1g")
    assert (agent.spot, agent.notice_s, agent.shutdown_s) == (spot, 120.0, 30.0)
    assert agent.address == "10.0.0.7:7078"
    assert agent.alone_s == 4 * 3600.0
    assert agent.mounts == (MOUNTS.default if mounts is None else mounts)


def test_the_startup_script_runs_the_agent_like_its_systemd_unit():
    def service(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("#")]

    ours = service(heredoc("sailor-agent.service"))
    theirs = service((ROOT / "systemd" / "sailor-agent.service").read_text())
    assert set(ours) - set(theirs) == {
        "ExecStart=/opt/sailor/bin/sailor-agent run --config /etc/sailor/agent.toml",
        "StartLimitAction=poweroff",
    }
    lacks = {line.partition("=")[0] for line in theirs if line not in ours}
    assert lacks == {"ExecStart", "Documentation", "OnFailure"}
    workers = service(heredoc("sailor-worker.service"))
    theirs = service((ROOT / "systemd" / "sailor-worker.service").read_text())
    assert "StartLimitAction=poweroff" in workers
    lacks = {line.partition("=")[0] for line in theirs if line not in workers}
    assert lacks == {"ExecStart", "Documentation", "OnFailure"}
    told = heredoc("/usr/lib/sailor/tell-shutdown")
    assert told == (ROOT / "systemd" / "tell-shutdown.sh").read_text().rstrip("\n")
    assert "ExecStop=+-/usr/lib/sailor/tell-shutdown $MAINPID" in ours
    assert f"RestartPreventExitStatus=2 {ALONE}" in ours, "an agent without a leader"
    assert any(line.startswith("ExecStopPost=+") and str(ALONE) in line for line in ours)


# ---- GKE ----------------------------------------------------------------------------------------


def test_the_gke_manifest_configures_an_agent(tmp_path: Path):
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((ROOT / "examples/gke/agents.yaml").read_text())
    space, quota, settings, agents = documents
    text = (
        settings["data"]["agent.toml"].replace("NODE", "gke-prod-1").replace("ADDRESS", "10.0.0.7")
    )
    assert "/etc/sailor/key/" in text
    (tmp_path / "ca.pem").touch()
    path = tmp_path / "agent.toml"
    path.write_text(text.replace("/etc/sailor/key/", f"{tmp_path}/"))
    agent = load_config(path)
    assert (agent.name, agent.spot) == ("gke-prod-1", True)
    assert (agent.notice_s, agent.shutdown_s) == (15.0, 15.0), "a pod has no more in any case"
    pod = agents["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/etc/sailor/key" in mounts
    assert agent.tls is not None
    assert str(agent.state) in mounts
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert {each["metadata"]["namespace"] for each in (quota, settings, agents)} == {
        space["metadata"]["name"]
    }
    (allowed,) = quota["spec"]["scopeSelector"]["matchExpressions"]
    assert pod["priorityClassName"] in allowed["values"], "GKE would make none of them"
    assert pod["hostNetwork"] is True, "a pod's own network hides the machine's metadata"
