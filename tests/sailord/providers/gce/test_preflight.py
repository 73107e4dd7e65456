"""Configuration errors that Google Cloud would reject, each reported with its cure."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sailord.providers.gce.config import DEFAULT_ACCOUNT, QUOTA_METRICS
from sailord.providers.gce.prices import GPU_NAMES
from sailord.providers.gce.provider import open_gce
from sailord.providers.interface import Pool, ProviderError, Refused
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from tests.fakes.gce.cloud import ACCOUNT, Cloud, InjectedFailure
from tests.fakes.gce.resources import Network, internal_rule
from tests.gce.cloud import HERE, THERE, ask, config, pool, provider

OUR_POOLS = (pool(), pool("us-east1-b", spot=False))


@pytest.mark.parametrize(
    ("behave", "place", "words"),
    [
        ({"project": "another"}, "provider.project", "gcloud projects list"),
        (
            {"denied": {"compute.projects.get"}},
            "provider.credentials",
            "--add-permissions=compute.projects.get",
        ),
        ({"denied": {"compute.zones.list"}}, "provider.credentials", "compute.zones.list"),
        ({"denied": {"compute.instances.list"}}, "provider.credentials", "instances.list"),
        (
            {"denied": {"compute.zoneOperations.list"}},
            "provider.credentials",
            "add-iam-policy-binding test-project",
        ),
        (
            {
                "failures": [
                    InjectedFailure(".*", 1, 403, "accessNotConfigured", "API has not been used")
                ]
            },
            "provider.credentials",
            "gcloud services enable compute.googleapis.com --project=test-project",
        ),
        ({"is_expired": True}, "provider.credentials", "gcloud auth"),
        ({"zones": {HERE: "us-central1"}}, "provider.zones", f"did you mean {chr(34)}{HERE}"),
        (
            {"not_offered": {("us-east1-b", "a2-highgpu-1g")}},
            "provider.machines",
            f"is not offered in us-east1-b; it is offered in europe-west4-a, {HERE}",
        ),
        (
            {"quotas": {("us-east1", "NVIDIA_A100_GPUS"): 0}},
            "provider.zones",
            "us-east1 grants 0 A100-40 on demand by NVIDIA_A100_GPUS; a2-highgpu-1g needs 1",
        ),
        ({"quotas": {("global", "GPUS_ALL_REGIONS"): 0}}, "provider.project", "GPUS_ALL"),
    ],
)
def test_bad_input_says_what_to_do(behave, place, words):
    cloud = Cloud(**behave)
    with provider(cloud, *OUR_POOLS) as gce, pytest.raises(InputError) as raised:
        asyncio.run(gce.check())
    (problem,) = raised.value.problems
    assert problem.place == place
    assert words in str(problem)
    assert problem.cure


@pytest.mark.parametrize(
    ("behave", "words"),
    [
        ({"denied": {"compute.instances.create"}}, "--add-permissions=compute.instances.create"),
        (
            {
                "failures": [
                    InjectedFailure("bulkInsert", 1, 403, "SERVICE_ACCOUNT_ACCESS_DENIED",
                         "The user does not have access to service account 'sailor-machine'")
                ]
            },
            "--role=roles/iam.serviceAccountUser",
        ),
        ({"is_expired": True}, "gcloud auth application-default login"),
        (
            {"quotas": {("us-central1", "NVIDIA_A100_GPUS"): 0}},
            "IAM & Admin > Quotas",
        ),
    ],
)  # fmt: skip
def test_a_refusal_that_needs_the_user_names_the_cure(behave, words):
    with provider(Cloud(**behave)) as gce:
        refused = asyncio.run(gce.create(ask()))
    assert isinstance(refused, Refused)
    assert words in refused.text


INTERNAL = internal_rule()
NAT = {"name": "nat", "sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS"}
PRIVATE = {"external_ip": False}
ALL_SUBNETS = {"sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_PRIMARY_IP_RANGES"}
OPEN = {"sourceRanges": ["10.0.0.0/8"]}
CUSTOM = {("us-central1", "lab"): {"ipCidrRange": "10.1.0.0/16"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "changes", "place", "words"),
    [
        (None, {}, "provider.network", 'test-project has no network "default"; name one'),
        ({"lacks": {"us-east1"}}, {}, "provider.subnetwork", 'us-east1 has no subnet "default"'),
        ({"is_automatic": False}, {}, "provider.subnetwork", "has no automatic subnets; name that"),
        (
            {"is_automatic": False, "subnets": CUSTOM, "rules": [INTERNAL | OPEN]},
            {"subnetwork": "lab"},
            "provider.subnetwork",
            'us-east1 has no subnet "lab"; make it: gcloud compute networks subnets create lab',
        ),
        (
            {"rules": []},
            {"tags": ("sailor",)},
            "provider.network",
            "close TCP 7078, 32768-60999 from nodes in 10.128.0.0/20 to nodes; gcloud compute"
            " firewall-rules create sailor-nodes --network=default --allow=tcp:7078,"
            "tcp:32768-60999 --source-ranges=10.128.0.0/20 --target-tags=sailor",
        ),
        (
            {},
            {"head_ip": "192.168.0.7"},
            "provider.network",
            "close TCP 7078 from sailord at 192.168.0.7 to nodes; gcloud compute firewall-rules",
        ),
        ({}, PRIVATE, "provider.external_ip", "no Cloud NAT: they reach no package index"),
        (
            {"routers": {"us-central1": [NAT | {"subnetworks": [{"name": "x/other"}]}]}},
            PRIVATE,
            "provider.external_ip",
            "gcloud compute routers nats create sailor --router=sailor --region=us-central1",
        ),
        (
            {},
            PRIVATE | {"package": ""},
            "provider.external_ip",
            "subnets update default --region=us-central1 --enable-private-ip-google-access",
        ),
        ({}, {"image": "debian-12"}, "provider.image", "/global/images/NAME"),
        (
            {},
            {"image": "projects/lab/global/images/family/none"},
            "provider.image",
            'project lab has no image family "none"; name one that `gcloud compute images list',
        ),
        ({}, {"image": "projects/lab/global/images/old"}, "provider.image", "obsolete; new"),
        ({}, {"disk_gb": 40}, "provider.disk_gb", "is 40, and the image needs 50 GB; set 50"),
        (
            {},
            {"service_account": "none@lab.iam.gserviceaccount.com"},
            "provider.service_account",
            'no service account "none@lab.iam.gserviceaccount.com"',
        ),
        (
            {},
            {"placement": {"us-central1": "far"}},
            "provider.placement",
            'no placement policy "far"',
        ),
        (
            {},
            {"reservations": {pool(spot=False): "none"}},
            "provider.reservation",
            f'{HERE} has no reservation "none"',
        ),
        (
            {},
            {"reservations": {pool(spot=False): "large"}},
            "provider.reservation",
            "is of a2-highgpu-8g, not of a2-highgpu-1g",
        ),
        (
            {},
            {"groups": {pool(): "none"}},
            "provider.group",
            f"{HERE} has no managed instance group",
        ),
    ],
)
def test_what_an_instance_needs_is_checked_before_it_is_rented(network, changes, place, words):
    cloud = Cloud(networks={} if network is None else {"default": Network(**network)})
    cloud.reservations["large"] = "a2-highgpu-8g"
    cloud.images["lab/global/images/old"] = {
        "deprecated": {"state": "OBSOLETE", "replacement": "projects/lab/global/images/new"}
    }
    with provider(cloud, *OUR_POOLS, **changes) as gce, pytest.raises(InputError) as raised:
        asyncio.run(gce.check())
    problem = raised.value.problems[0]
    assert problem.place == place
    assert words in str(problem)
    assert not any(line.startswith("POST") and "testIam" not in line for line in cloud.asked)


def test_an_account_that_sailord_may_not_use_is_named():
    cloud = Cloud(denied={"iam.serviceAccounts.actAs"})
    with provider(cloud, service_account=ACCOUNT) as gce, pytest.raises(InputError) as raised:
        asyncio.run(gce.check())
    (problem,) = raised.value.problems
    assert f'may not use the service account "{ACCOUNT}"' in str(problem)
    assert f"service-accounts add-iam-policy-binding {ACCOUNT}" in str(problem)


def warnings_of(cloud: Cloud, **changes) -> list[str]:
    with provider(cloud, *OUR_POOLS, **{"service_account": ACCOUNT, **changes}) as gce:
        return [str(one) for one in asyncio.run(gce.check())]


LISTED = {("us-central1", "NVIDIA_A100_GPUS"): 8.0, ("us-east1", "NVIDIA_A100_GPUS"): 8.0}


def test_possible_failures_are_warnings():
    assert warnings_of(Cloud(quotas=LISTED)) == []
    (told,) = warnings_of(Cloud(quotas=LISTED), service_account=DEFAULT_ACCOUNT)
    assert "the project's default account" in told
    (told,) = warnings_of(Cloud(quotas=LISTED, denied={"compute.networks.get"}))
    assert "cannot be checked: forbidden: Required 'compute.networks.get' permission" in told


def policy(*rules: dict[str, Any], of: str = "HIERARCHY") -> dict[str, Any]:
    """A firewall policy, with the rule that each of them ends with."""
    last = {"direction": "INGRESS", "priority": 2147483646, "action": "goto_next"}
    last |= {"match": {"srcIpRanges": ["0.0.0.0/0"], "layer4Configs": [{"ipProtocol": "all"}]}}
    return {"name": "locations/global/firewallPolicies/77", "type": of, "priority": 1,
            "displayName": "guard", "rules": [*rules, last]}  # fmt: skip


def policy_rule(
    action: str,
    *ports: str,
    priority: int = 10,
    match: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    told = {"srcIpRanges": ["10.0.0.0/8"]} if match is None else match
    matched = {**told, "layer4Configs": [{"ipProtocol": "tcp", "ports": list(ports)}]}
    return {"direction": "INGRESS", "priority": priority, "action": action, "match": matched,
            **changes}  # fmt: skip


DENY, ALLOW = policy_rule("deny", "7078"), policy_rule("allow")
EARLIER = policy_rule("goto_next", priority=1)
OF_OTHERS = [
    policy_rule("deny", targetResources=["https://x/projects/p/global/networks/other"]),
    policy_rule("deny", targetSecureTags=[{"name": "tagValues/1"}]),
    policy_rule("deny", targetServiceAccounts=["web@p.iam"]),
    policy_rule("deny", direction="EGRESS"),
    policy_rule("deny", disabled=True),
    policy_rule("deny", match={"srcIpRanges": ["192.168.0.0/16"]}),
]
NETWORKS_OWN = {"of": "NETWORK"}
BY_NAME = {"srcFqdns": ["nodes.example"]}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Network(policies=[policy(DENY)]),
         "the firewall policy 77 closes TCP 7078 from nodes in 10.128.0.0/20 to nodes; "
         "admit them in it: gcloud compute firewall-policies describe 77"),
        (Network(policies=[policy(EARLIER, DENY)]), ""),
        (Network(policies=[policy(*OF_OTHERS)]), ""),
        (Network(policies=[policy(ALLOW)], rules=[]), ""),
        (Network(policies=[policy()], rules=[]), "close TCP 7078, 32768-60999 from nodes"),
        (Network(policies=[policy(DENY, **NETWORKS_OWN)]), ""),
        (Network(policies=[policy(DENY, **NETWORKS_OWN)], order="BEFORE_CLASSIC_FIREWALL"),
         "policy guard closes TCP 7078 from nodes in 10.128.0.0/20 to nodes; admit them in it: "
         "gcloud compute network-firewall-policies describe guard --global"),
        (Network(policies=[policy(ALLOW, **NETWORKS_OWN)], rules=[]), ""),
        (Network(policies=[policy(policy_rule("allow", match=BY_NAME))], rules=[]),
         "may close TCP 7078, 32768-60999 from nodes in 10.128.0.0/20"),
        (Network(policies=[policy(policy_rule("deny", "7078", match=BY_NAME))]),
         "policy 77 may close TCP 7078 from nodes"),
    ],
)  # fmt: skip
def test_firewall_policies_are_read_in_googles_order_and_warned_of(found, told):
    warned = warnings_of(Cloud(quotas=LISTED, networks={"default": found}))
    assert bool(warned) == bool(told), warned
    assert told in "".join(warned)


EAST, GLOBAL, OPENED = "us-east1", policy(ALLOW, of="NETWORK"), policy(ALLOW, of="NETWORK_REGIONAL")
SYSTEMS = policy(DENY, of="SYSTEM_REGIONAL")
CLOSED = policy(DENY, of="NETWORK_REGIONAL")
EARLY = {"order": "BEFORE_CLASSIC_FIREWALL"}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Network(regional={EAST: [CLOSED]}), ""),
        (Network(regional={EAST: [CLOSED]}, **EARLY),
         "policy guard closes TCP 7078 from nodes in 10.128.0.0/20 to nodes in us-east1; admit them"
         " in it: gcloud compute network-firewall-policies describe guard --region=us-east1"),
        (Network(regional={EAST: [CLOSED]}, policies=[GLOBAL], **EARLY), ""),
        (Network(regional={EAST: [CLOSED, SYSTEMS]}),
         "firewall policy 77 closes TCP 7078 from nodes in 10.128.0.0/20 to nodes in us-east1"),
        (Network(regional={EAST: [OPENED]}, rules=[]),
         'rules of network "default" close TCP 7078, 32768-60999 from nodes in 10.142.0.0/20 '
         "to nodes in us-central1; "),
        (Network(regional={EAST: [OPENED], "us-central1": [OPENED]}, rules=[]), ""),
    ],
)  # fmt: skip
def test_a_regions_own_firewall_policies_decide_on_what_arrives_there(found, told):
    try:
        warned = warnings_of(Cloud(quotas=LISTED, networks={"default": found}))
    except InputError as error:  # A region without any policy leaves no doubt.
        warned = list(map(str, error.problems))
    assert bool(warned) == bool(told), warned
    assert told in "".join(warned)
    assert "nodes in us-central1" not in "".join(warned) or "us-central1" in told


@pytest.mark.parametrize("nat", [{"subnetworks": [{"name": "x/default"}]}, ALL_SUBNETS])
def test_instances_without_an_address_get_out_through_a_nat(nat):
    routers = {region: [NAT | nat] for region in ("us-central1", "us-east1")}
    networks = {"default": Network(routers=routers)}
    assert warnings_of(Cloud(quotas=LISTED, networks=networks), external_ip=False) == []


def test_an_unlisted_quota_is_unknown_and_not_unlimited():
    cloud = Cloud(quotas={("us-central1", "NVIDIA_A100_GPUS"): 8.0})
    (told,) = warnings_of(cloud)
    assert "the quota of A100-40 on demand in us-east1 is unknown" in told
    assert "Google lists none of A100-40 there" in told


H100 = Pool(HERE, "a3-highgpu-8g", "H100-80", 8, False)
OF_H100 = ("us-central1", "NVIDIA_H100_GPUS")


@pytest.mark.parametrize(
    ("behave", "words"),
    [
        ({}, "Google lists none of H100-80 there"),
        ({"families": {OF_H100: 8}}, ""),
        ({"denied": {"cloudquotas.quotas.get"}},
         "roles update sailor --project=test-project --add-permissions=cloudquotas.quotas.get"),
        ({"has_quotas_api": False},
         "gcloud services enable cloudquotas.googleapis.com --project=test-project"),
    ],
)  # fmt: skip
def test_quotas_by_family_of_gpus_are_read_or_unknown_with_a_cure(behave, words):
    with provider(Cloud(**behave), H100, service_account=ACCOUNT) as gce:
        told = [str(one) for one in asyncio.run(gce.check())]
    assert bool(told) == bool(words), told
    assert words in "".join(told)
    assert not told or "the quota of H100-80 on demand in us-central1 is unknown" in told[0]


def test_a_quota_by_family_that_is_too_small_prevents_renting():
    with provider(Cloud(families={OF_H100: 4}), H100) as gce, pytest.raises(InputError) as raised:
        asyncio.run(gce.check())
    (problem,) = raised.value.problems
    assert "grants 4 H100-80 on demand by GPUS_PER_GPU_FAMILY of NVIDIA_H100" in str(problem)


def test_every_gpu_that_google_offers_has_a_quota_metric_and_a_name_in_its_price_list():
    machines = load_catalogue().machines.values()
    offered = {machine.gpu for machine in machines if machine.prices} - {"cpu"}
    assert offered <= set(QUOTA_METRICS)
    assert offered <= set(GPU_NAMES)


def test_all_mistakes_are_reported_at_once():
    cloud = Cloud(
        not_offered={(HERE, "a2-highgpu-1g")},
        quotas={("us-central1", "NVIDIA_A100_GPUS"): 0, ("us-east1", "NVIDIA_A100_GPUS"): 0},
    )
    with provider(cloud, *OUR_POOLS) as gce, pytest.raises(InputError) as raised:
        asyncio.run(gce.check())
    assert len(raised.value.problems) == 3


def test_an_unreachable_cloud_is_no_configuration_error():
    cloud = Cloud(failures=[InjectedFailure(".*", 1000, status=503)])
    with provider(cloud) as gce, pytest.raises(ProviderError):
        asyncio.run(gce.check())


def test_attached_gpus_are_checked_on_their_own():
    t4 = [Pool(zone, "n1-standard-8-t4-1", "T4", 1, True) for zone in (HERE, THERE)]
    cloud = Cloud(not_offered={(THERE, "nvidia-tesla-t4")})
    with provider(cloud, *t4) as gce:
        with pytest.raises(InputError) as raised:
            asyncio.run(gce.check())
        refused = asyncio.run(gce.create(ask(of=t4[1])))
    (problem,) = raised.value.problems
    assert problem.place == "provider.machines"
    assert f"nvidia-tesla-t4 is not offered in {THERE}; it is offered in {HERE}" in str(problem)
    assert refused.kind == "bad_request", "it is as the check said"
    with provider(Cloud(), *t4) as gce:
        asyncio.run(gce.check())
        assert len(asyncio.run(gce.create(ask(of=t4[1]))).instances) == 1


def test_a_correct_configuration_has_no_problems():
    with provider(Cloud(), *OUR_POOLS) as gce:
        asyncio.run(gce.check())


def test_an_unreachable_zone_is_no_configuration_error():
    with provider(Cloud(unreachable={HERE}), *OUR_POOLS) as gce:
        asyncio.run(gce.check())


def test_missing_credentials_are_reported_with_the_cure(monkeypatch, tmp_path: Path):
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(InputError, match="gcloud auth application-default login"):
        open_gce(replace(config(""), endpoint=None), load_catalogue())


@pytest.mark.parametrize("text", [None, "", "{}", "not JSON"])
def test_an_invalid_key_file_is_reported(tmp_path: Path, text):
    path = tmp_path / "key.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"key\.json"):
        open_gce(replace(config(""), endpoint=None, credentials=path), load_catalogue())
