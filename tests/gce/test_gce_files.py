"""Files for Google Cloud: sailord's configuration, the startup script, GKE's manifest."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agents.config import load_config
from sailord.providers.gce.config import machine_shape, read_gce
from sailord.providers.gce.errors import gce_error
from sailord.providers.gce.requests import TORCH, bulk_insert_body, instance_names, startup_script
from sailord.providers.interface import Pool
from simulator.documents.fields import open_table
from simulator.documents.files import load_document
from simulator.documents.problems import Problems
from simulator.hardware.catalogue import load_catalogue
from tests.gce.cloud import HERE, ask, config, pool

ROOT = Path(__file__).resolve().parent.parent.parent
GOOD = """
project = "test-project"
zones = ["us-central1-a", "us-east1-b"]
machines = ["a2-highgpu-1g"]
contracts = ["spot", "on-demand"]
store = "etcd://10.0.0.1:2379"
key_secret = "projects/test-project/secrets/key/versions/3"
package = "sailor[worker]@https://host.example/sailor-0.1.0-py3-none-any.whl#sha256=SUM"
""".replace("SUM", "0a" * 32)


def read(tmp_path: Path, text: str):
    """Read a provider's table; give it, and what is wrong with it."""
    path = tmp_path / "sailord.toml"
    path.write_text(text)
    problems = Problems()
    table = open_table(load_document(path, flaws_raise=False), problems)
    found = read_gce(table, folder=tmp_path, cluster_name="prod", catalogue=load_catalogue())
    table.finish()
    return found, problems.found


def test_pools_are_all_combinations_of_zones_machines_and_contracts(tmp_path: Path):
    found, problems = read(tmp_path, GOOD)
    assert problems == []
    assert set(found.pools) == {
        Pool(zone, "a2-highgpu-1g", "A100-40", 1, spot)
        for zone in ("us-central1-a", "us-east1-b")
        for spot in (True, False)
    }
    assert found.regions == ("us-central1", "us-east1")


def test_groups_are_read_and_must_match_a_pool(tmp_path: Path):
    group = '[[group]]\nzone = "us-east1-b"\nmachine = "a2-highgpu-1g"\nname = "mig"\n'
    found, problems = read(tmp_path, GOOD + group)
    assert problems == []
    assert found.groups == {pool("us-east1-b"): "mig"}
    _, problems = read(tmp_path, GOOD + group.replace("us-east1-b", "us-east4-b"))
    assert ["is not a pool" in str(problem) for problem in problems] == [True]


@pytest.mark.parametrize(
    ("line", "wrong", "words"),
    [
        ("project", 'project = "My Project"', "gcloud projects list"),
        ("project", "", "is missing"),
        ("zones", 'zones = ["us-central1"]', "such as us-central1-a"),
        ("zones", "zones = []", "give a list of texts"),
        ("machines", 'machines = ["a2-hihgpu-1g"]', 'did you mean "a2-highgpu-1g"'),
        ("contracts", 'contracts = ["cheap"]', 'give "spot" or "on-demand"'),
        ("store", 'store = "unix:///var/lib/sailor/store.sock"', "etcd://HOST:PORT"),
        ("key_secret", 'key_secret = "cluster.key"', "versions/NUMBER"),
        ("package", 'package = "sailor[worker]"', "pin a wheel"),
        ("package", 'package = "sailor==0.1.0\'; rm -rf /"', "pin a wheel"),
        ("package", 'package = "https://host.example/sailor.whl"', "pin a wheel"),
        ("package", 'package = "x"\nimagee = "y"', "unknown key"),
    ],
)
def test_a_mistake_in_the_file_is_reported_at_its_key(tmp_path: Path, line, wrong, words):
    text = re.sub(rf"^{line} = .*$", lambda _: wrong, GOOD, flags=re.MULTILINE)
    _, problems = read(tmp_path, text)
    assert words in "\n".join(str(problem) for problem in problems)


@pytest.mark.parametrize(
    "package",
    [
        "sailor[worker]==0.1.0",
        f"https://host.example/sailor-0.1.0-py3-none-any.whl#sha256={'0' * 64}",
        f"sailor@file:///opt/sailor-0.1.0-py3-none-any.whl#sha256={'0' * 64}",
    ],
)
def test_a_package_is_pinned_by_version_or_hash(tmp_path: Path, package):
    text = re.sub(r"^package = .*$", f'package = "{package}"', GOOD, flags=re.MULTILINE)
    found, problems = read(tmp_path, text)
    assert (problems, found.package) == ([], package)


def test_attached_gpus_are_requested_as_accelerators():
    assert machine_shape("n1-standard-16-v100-2") == ("n1-standard-16", "nvidia-tesla-v100", 2)
    assert machine_shape("a2-highgpu-2g") == ("a2-highgpu-2g", "", 0)
    v100 = Pool(HERE, "n1-standard-16-v100-2", "V100-16", 2, True)
    properties = bulk_insert_body(ask(1, of=v100), config(""))["instance_properties"]
    assert properties["machine_type"] == "n1-standard-16"
    assert properties["guest_accelerators"] == [
        {"accelerator_type": "nvidia-tesla-v100", "accelerator_count": 2}
    ]


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


@pytest.mark.parametrize("spot", [True, False])
def test_the_startup_script_writes_a_valid_agent_file(tmp_path: Path, spot):
    text = startup_script(pool(spot=spot), config(""))
    found = re.search(r"agent.toml <<END\n(.*?)\nEND\n", text, re.DOTALL)
    assert found is not None
    told = found[1].replace("$(metadata name)", "sailor-prod-1").replace("${zone##*/}", HERE)
    told = told.replace("$(metadata network-interfaces/0/ip)", "10.0.0.7")
    path = tmp_path / "agent.toml"
    path.write_text(told)
    agent = load_config(path)
    assert (agent.name, agent.zone, agent.machine) == ("sailor-prod-1", HERE, "a2-highgpu-1g")
    assert (agent.spot, agent.notice_s, agent.shutdown_s) == (spot, 120.0, 30.0)
    assert agent.address == "10.0.0.7:7078"


def test_the_startup_script_runs_the_agent_like_its_systemd_unit():
    def service(text: str) -> dict[str, str]:
        unit = configparser.ConfigParser(strict=False)
        unit.optionxform = str
        unit.read_string(text)
        return dict(unit["Service"])

    ours = service(heredoc("sailor-agent.service"))
    theirs = service((ROOT / "systemd" / "sailor-agent.service").read_text())
    differing = {key for key, value in ours.items() if theirs.get(key) != value}
    assert differing == {"ExecStart"}


# ---- GKE ----------------------------------------------------------------------------------------


def test_the_gke_manifest_configures_an_agent(tmp_path: Path):
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((ROOT / "examples/gke/agents.yaml").read_text())
    space, quota, settings, agents = documents
    text = (
        settings["data"]["agent.toml"].replace("NODE", "gke-prod-1").replace("ADDRESS", "10.0.0.7")
    )
    path = tmp_path / "agent.toml"
    path.write_text(text)
    agent = load_config(path)
    assert (agent.name, agent.spot) == ("gke-prod-1", True)
    assert (agent.notice_s, agent.shutdown_s) == (15.0, 15.0), "a pod has no more in any case"
    pod = agents["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(agent.key.parent) in mounts
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


# ---- codes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "errors", "kind"),
    [
        (503, [("ZONE_RESOURCE_POOL_EXHAUSTED", "x")], "stockout"),
        (503, [("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_ANYTHING_NEW", "x")], "stockout"),
        (0, [("VM_MIN_COUNT_NOT_REACHED", "x"), ("QUOTA_EXCEEDED", "y")], "quota"),
        (0, [("VM_MIN_COUNT_NOT_REACHED", "x"), ("ODD", "y")], "unknown"),
        (0, [("VM_MIN_COUNT_NOT_REACHED", "x")], "unknown"),
        (403, [("quotaExceeded", "Quota 'Queries per minute' exceeded: per minute")], "rate"),
        (403, [("quotaExceeded", "Quota 'CPUS' exceeded.")], "quota"),
        (403, [("forbidden", "Required 'compute.disks.create' permission")], "permission"),
        (403, [("accessNotConfigured", "enable the API")], "permission"),
        (429, [], "rate"),
        (404, [], "bad_request"),
        (404, [("notFound", "x")], "bad_request"),
        (400, [("required", "x")], "bad_request"),
        (401, [("required", "x")], "permission"),
        (403, [], "permission"),
        (503, [("backendError", "x")], "unknown"),
        *(
            (status, [("resourceNotReady", "x")], kind)
            for status, kind in (
                *((400, "unknown"), (403, "unknown"), (404, "unknown"), (409, "unknown")),
                *((412, "unknown"), (418, "unknown"), (0, "unknown")),
                *((401, "permission"), (429, "rate")),
            )
        ),
    ],
)
def test_error_codes_take_precedence_over_http_statuses(status, errors, kind):
    found = gce_error(status, errors)
    assert found.kind == kind
    assert found.code in found.text, "it is told as it came"


def test_only_errors_without_a_meaning_are_transient():
    assert gce_error(503, [("backendError", "x")]).is_transient
    assert not gce_error(503, [("ZONE_RESOURCE_POOL_EXHAUSTED", "x")]).is_transient
    assert not gce_error(418, [("ODD", "x")]).is_transient
