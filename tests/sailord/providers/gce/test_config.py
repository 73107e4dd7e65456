"""Reading [provider] with kind = "gce", and its mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sailord.providers.gce.config import read_gce
from sailord.providers.gce.prices import prices_of
from sailord.providers.interface import Pool
from simulator.documents.fields import open_table
from simulator.documents.files import load_document
from simulator.documents.problems import Problems
from simulator.hardware.catalogue import load_catalogue
from tests.gce.cloud import pool

GOOD = """
project = "test-project"
zones = ["us-central1-a", "us-east1-b"]
machines = ["a2-highgpu-1g"]
contracts = ["spot", "on-demand"]
store = "etcd://10.0.0.1:2379"
key_secret = "projects/test-project/secrets/key/versions/3"
service_account = "machine@test-project.iam.gserviceaccount.com"
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


def test_the_account_of_instances_is_named_unless_templates_name_it(tmp_path: Path):
    found, _ = read(tmp_path, GOOD)
    assert found.service_account == "machine@test-project.iam.gserviceaccount.com"
    lacks = "\n".join(line for line in GOOD.splitlines() if not line.startswith("service_account"))
    one = lacks.replace(', "us-east1-b"]', "]").replace(', "on-demand"]', "]")
    group = '\n[[group]]\nzone = "us-central1-a"\nmachine = "a2-highgpu-1g"\nname = "mig"\n'
    assert read(tmp_path, one + group)[1] == []
    for text in (one, lacks + group):
        assert ["service_account: is missing" in str(each) for each in read(tmp_path, text)[1]] == [
            True
        ]
    found, problems = read(tmp_path, f'{lacks}\nservice_account = "default"\n')
    assert (found.service_account, problems) == ("default", [])


FLEX_GROUP = """
[[group]]
zone = "us-east1-b"
machine = "a2-highgpu-1g"
name = "queue"
flex_start = true
usd_per_hour = 2.5
"""


def test_only_groups_have_pools_whose_requests_wait(tmp_path: Path):
    text = GOOD.replace('"spot", "on-demand"', '"spot", "flex-start"')
    found, problems = read(tmp_path, text + FLEX_GROUP)
    assert problems == []
    flex = Pool("us-east1-b", "a2-highgpu-1g", "A100-40", 1, spot=False, flex=True)
    assert set(found.pools) == {pool(), pool("us-east1-b"), flex}
    assert (found.groups, found.group_prices) == ({flex: "queue"}, {flex: 2.5})
    assert prices_of(found.pools, load_catalogue(), None, found.group_prices)[flex] == 2.5
    on_demand = prices_of([pool("us-east1-b", spot=False), flex], load_catalogue())
    assert len(set(on_demand.values())) == 1, "without a price of its own it is that on demand"
    alone, problems = read(
        tmp_path, GOOD.replace('"spot", "on-demand"', '"flex-start"') + FLEX_GROUP
    )
    assert (problems, alone.pools) == ([], (flex,))


@pytest.mark.parametrize(
    ("contracts", "group", "words"),
    [
        ('"spot", "flex-start"', "", "group: is missing with flex_start = true"),
        ('"spot"', FLEX_GROUP, "a2-highgpu-1g in us-east1-b (flex start) is not a pool"),
        ('"on-demand", "flex-start"', FLEX_GROUP, "has two contracts without preemption"),
        ('"flexible"', "", '"flex-start"'),
    ],
)
def test_mistakes_about_the_queue_are_named(tmp_path: Path, contracts, group, words):
    _, problems = read(tmp_path, GOOD.replace('"spot", "on-demand"', contracts) + group)
    assert words in "\n".join(map(str, problems))


def test_groups_are_read_and_must_match_a_pool(tmp_path: Path):
    group = '[[group]]\nzone = "us-east1-b"\nmachine = "a2-highgpu-1g"\nname = "mig"\n'
    found, problems = read(tmp_path, GOOD + group)
    assert problems == []
    assert found.groups == {pool("us-east1-b"): "mig"}
    _, problems = read(tmp_path, GOOD + group.replace("us-east1-b", "us-east4-b"))
    assert ["is not a pool" in str(problem) for problem in problems] == [True]


def test_reservations_are_read_and_must_match_an_on_demand_pool(tmp_path: Path):
    spot_only = GOOD.replace(', "on-demand"', "")
    entry = '[[reservation]]\nzone = "us-east1-b"\nmachine = "a2-highgpu-1g"\nname = "mine"\n'
    usual = pool("us-east1-b", spot=False)
    found, problems = read(tmp_path, GOOD + entry)
    assert problems == []
    assert found.reservations == {usual: "mine"}
    _, problems = read(tmp_path, spot_only + entry)
    assert ['the contract "on-demand"' in str(problem) for problem in problems] == [True]
    _, problems = read(tmp_path, GOOD + entry.replace('"mine"', '"../x"'))
    assert ["gcloud compute reservations list" in str(problem) for problem in problems] == [True]
    group = entry.replace("reservation", "group") + "spot = false\n"
    _, problems = read(tmp_path, GOOD + group + entry)
    assert ["the template of the group" in str(problem) for problem in problems] == [True]


@pytest.mark.parametrize(
    ("line", "wrong", "words"),
    [
        ("project", 'project = "My Project"', "gcloud projects list"),
        ("project", "", "is missing"),
        ("zones", 'zones = ["us-central1"]', "such as us-central1-a"),
        ("zones", "zones = []", "give a list of texts"),
        ("machines", 'machines = ["a2-hihgpu-1g"]', 'did you mean "a2-highgpu-1g"'),
        ("contracts", 'contracts = ["cheap"]', 'give "spot", "on-demand" or "flex-start"'),
        ("store", 'store = "unix:///var/lib/sailor/store.sock"', "etcd://HOST:PORT"),
        ("service_account", "", 'make one with the least rights (docs/gce.md); "default": the'),
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
