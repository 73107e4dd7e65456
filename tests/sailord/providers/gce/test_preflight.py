"""Configuration errors that Google Cloud would reject, each reported with its cure."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sailord.providers.gce.provider import open_gce
from sailord.providers.interface import Pool, ProviderError, Refused
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from tests.fakes.gce.cloud import Cloud, InjectedFailure
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
