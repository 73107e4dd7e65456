"""The documented role has what the provider's calls need, and no more."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from sailord.providers.interface import Granted, Pool
from simulator.documents.problems import InputError
from tests.fakes.gce.cloud import ROLE, Cloud, Group, role_permissions
from tests.gce.cloud import HERE, THERE, ask, pool, provider

T4 = Pool(HERE, "n1-standard-8-t4-1", "T4", 1, False)
GROUPED = pool(THERE)
PROPERTIES = {
    "machineType": "a2-highgpu-1g",
    "labels": {"sailor-cluster": "prod"},
    "scheduling": {"provisioningModel": "SPOT"},
}
EVERYTHING = {
    "groups": {GROUPED: "pool"},
    "placement": {"us-central1": "near"},
    "tags": ("sailor",),
    "service_account": "sailor-machine@test-project.iam.gserviceaccount.com",
}


async def do_all(gce) -> list[object]:
    """Do all that sailord ever asks of the provider."""
    await gce.check()
    await gce.prices()
    await gce.quotas()
    asks = [ask(1, of=of, number=number) for number, of in enumerate((T4, pool(), GROUPED))]
    outcomes = [await gce.create(one) for one in asks]
    seen = await gce.observe()
    deleted = await gce.delete([one.id for one in seen.instances])
    return [*(o for o in outcomes if not isinstance(o, Granted)), *deleted.failed.values()]


def cloud(**behave) -> Cloud:
    return Cloud(groups={"pool": Group("pool", THERE, PROPERTIES)}, **behave)


def test_the_role_has_what_the_calls_need_and_no_more():
    world = cloud()
    with provider(world, T4, pool(), GROUPED, **EVERYTHING) as gce:
        assert asyncio.run(do_all(gce)) == []
    assert world.needed == role_permissions()


@pytest.mark.parametrize("permission", sorted(role_permissions()))
def test_a_permission_that_is_missing_is_named_with_its_cure(permission):
    world = cloud(granted=role_permissions() - {permission})
    with provider(world, T4, pool(), GROUPED, **EVERYTHING) as gce:
        try:
            told = str(asyncio.run(do_all(gce)))
        except InputError as error:
            told = str(error)
    assert f"'{permission}'" in told
    assert f"roles update sailor --project=test-project --add-permissions={permission}" in told


def test_each_permission_names_the_call_that_needs_it():
    lines = [line for line in ROLE.read_text().splitlines() if line.startswith("- ")]
    assert all(re.fullmatch(r"- [\w.]+ +# .+", line) for line in lines)


def test_the_role_is_one_that_gcloud_reads():
    yaml = pytest.importorskip("yaml")
    role = yaml.safe_load(ROLE.read_text())
    assert set(role) == {"title", "description", "stage", "includedPermissions"}
    assert set(role["includedPermissions"]) == role_permissions()
    assert len(role["includedPermissions"]) == len(role_permissions())


def test_the_documents_create_that_role():
    root = Path(__file__).resolve().parents[4]
    assert f"--file={ROLE.relative_to(root)}" in (root / "docs" / "gce.md").read_text()
