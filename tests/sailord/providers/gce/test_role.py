"""The documented role has what the provider's calls need, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sailord.providers.gce.requests import startup_script
from sailord.providers.interface import Granted, Pool, Queued
from simulator.documents.problems import InputError
from tests.fakes.gce.cloud import ACCOUNT, ROLE, Cloud, role_permissions
from tests.fakes.gce.resources import Group, Network
from tests.gce.cloud import HERE, THERE, ask, config, pool, provider

T4 = Pool(HERE, "n1-standard-8-t4-1", "T4", 1, False)
H100 = Pool(HERE, "a3-highgpu-8g", "H100-80", 8, False)
GROUPED = pool(THERE)
FLEX = replace(pool(), spot=False, flex=True)
POOLS = (T4, pool(), GROUPED, H100, FLEX)
PROPERTIES = {
    "machineType": "a2-highgpu-1g",
    "labels": {"sailor-cluster": "prod"},
    "scheduling": {"provisioningModel": "SPOT"},
}
SCRIPT = {"key": "startup-script", "value": startup_script(FLEX, config("http://127.0.0.1"))}
QUEUEING = PROPERTIES | {
    "scheduling": {"provisioningModel": "FLEX_START"},
    "metadata": {"items": [SCRIPT]},
}
IMAGE, OTHER = (f"test-project/global/images/{name}" for name in ("family/sailor", "sailor-2"))
EVERYTHING = {
    "groups": {GROUPED: "pool", FLEX: "flex"},
    "placement": {"us-central1": "near"},
    "reservations": {T4: "mine"},
    "tags": ("sailor",),
    "image": f"projects/{IMAGE}",
    "service_account": ACCOUNT,
}
OTHERWISE = {"image": f"projects/{OTHER}", "external_ip": False, "service_account": ACCOUNT}
NAT = {"name": "nat", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}


def world() -> Cloud:
    """A cloud that has all that is configured."""
    metrics = ("NVIDIA_A100_GPUS", "NVIDIA_T4_GPUS")
    return Cloud(
        groups={
            "pool": Group("pool", THERE, PROPERTIES),
            "flex": Group("flex", FLEX.zone, QUEUEING),
        },
        networks={"default": Network(routers={"us-central1": [NAT]})},
        images={IMAGE: {}, OTHER: {}},
        reservations={"mine": "n1-standard-8"},
        quotas={("us-central1", metric): 99.0 for metric in metrics},
        families={("us-central1", "NVIDIA_H100_GPUS"): 99},
    )


@contextlib.contextmanager
def doing_all(cloud: Cloud) -> Iterator[Callable[[int], str]]:
    """Return a function that makes each call of sailord's and returns the failures."""

    async def play(number: int) -> str:
        wrong: list[object] = []
        for gce in (private, usual):
            try:
                wrong += await gce.check()
            except InputError as error:
                wrong.append(error)
        await usual.prices()
        for index, of in enumerate(POOLS):
            outcome = await usual.create(ask(1, of=of, number=len(POOLS) * number + index))
            wrong += [] if isinstance(outcome, Granted | Queued) else [outcome]
        with contextlib.suppress(Exception):
            await usual.quotas()
            await usual.observe()
        known = [str(vm.id) for vm in cloud.there()]
        wrong += (await usual.delete(known)).failed.values()
        return "\n".join(str(one) for one in wrong)

    with (
        provider(cloud, pool(), **OTHERWISE) as private,
        provider(cloud, *POOLS, **EVERYTHING) as usual,
    ):
        yield lambda number: asyncio.run(play(number))


def test_the_role_has_what_the_calls_need_and_no_more():
    cloud = world()
    with doing_all(cloud) as play:
        assert play(0) == ""
    assert cloud.needed == role_permissions()


@pytest.mark.slow
def test_a_permission_that_is_missing_is_named_with_its_cure():
    cloud = world()
    with doing_all(cloud) as play:
        for number, permission in enumerate(sorted(role_permissions())):
            cloud.granted = role_permissions() - {permission}
            told = play(number)
            assert f"'{permission}'" in told
            assert (
                f"roles update sailor --project=test-project --add-permissions={permission}" in told
            )


def test_each_permission_names_the_call_that_needs_it():
    lines = [line for line in ROLE.read_text().splitlines() if line.startswith("- ")]
    assert all(re.fullmatch(r"- [\w.]+ +# .+", line) for line in lines)


def test_the_role_is_one_that_gcloud_reads():
    yaml = pytest.importorskip("yaml")
    role = yaml.safe_load(ROLE.read_text())
    assert set(role) == {"title", "description", "stage", "includedPermissions"}
    assert sorted(role["includedPermissions"]) == sorted(role_permissions())


def test_the_documents_create_that_role():
    root = Path(__file__).resolve().parents[4]
    assert f"--file={ROLE.relative_to(root)}" in (root / "docs" / "gce.md").read_text()
