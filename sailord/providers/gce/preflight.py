"""Checks the configuration against Google's API before anything is rented."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sailord.providers.gce.client import LOGIN, GceClient
from sailord.providers.gce.config import GceConfig, machine_shape, region_of
from sailord.providers.gce.errors import GceError
from sailord.providers.gce.observe import read_aggregated
from sailord.providers.gce.quotas import EVERY_GPU, Limits, quota_metric, read_limits
from sailord.providers.gce.requests import CLUSTER_LABEL
from sailord.providers.interface import Pool, ProviderError
from simulator.documents.problems import Problem, Problems, nearest

ROLE = "sailor"
"""The custom role of docs/gce.md, which ``role.yaml`` beside this file makes."""
MACHINE_ROLE = "roles/iam.serviceAccountUser"
"""To make instances with a service account of their own."""
LISTED = {"MachineTypes": "machine_types", "AcceleratorTypes": "accelerator_types"}
NOT_ENABLED = frozenset({"accessNotConfigured", "SERVICE_DISABLED"})


async def check(api: GceClient, config: GceConfig) -> None:
    """Check all that the configuration names; raise ``InputError`` with every mistake."""
    problems = Problems()
    try:
        project = read_limits((await api.call("Projects", "get")).quotas)
    except GceError as failure:
        # Nothing else can be checked without the project.
        problems.found.append(_problem_of(failure, config))
        problems.raise_if_any()
        raise AssertionError("raise_if_any has raised") from failure
    zones: frozenset[str] = frozenset()
    try:
        pages = await api.pages("Zones", "list")
        zones = frozenset(zone.name for page in pages for zone in page.items)
    except GceError as failure:
        problems.found.append(_problem_of(failure, config))
    else:
        problems.found += [
            Problem("provider.zones", f'Google has no zone "{zone}"', nearest(zone, zones))
            for zone in config.zones
            if zone not in zones
        ]
    pools = [pool for pool in config.pools if pool.zone in zones]
    for found in (
        _check_listing(api, config),
        _check_machines(api, pools),
        _check_quotas(api, pools, project),
    ):
        try:
            problems.found += await found
        except GceError as failure:
            problems.found.append(_problem_of(failure, config))
    # One missing permission may cause several.
    problems.found = list(dict.fromkeys(problems.found))
    problems.raise_if_any()


async def _check_listing(api: GceClient, config: GceConfig) -> Sequence[Problem]:
    rule = f'labels.{CLUSTER_LABEL}="{config.cluster_name}"'
    await api.pages("Instances", "aggregated_list", filter=rule)
    await api.pages("GlobalOperations", "aggregated_list", max_results=1, is_enough=lambda _: True)
    return ()


async def _check_machines(api: GceClient, pools: Sequence[Pool]) -> Sequence[Problem]:
    zones: dict[tuple[str, str], set[str]] = {}
    for pool in pools:
        machine, card, _ = machine_shape(pool.machine)
        zones.setdefault(("MachineTypes", machine), set()).add(pool.zone)
        if card:
            # Attached GPUs are offered per zone on their own.
            zones.setdefault(("AcceleratorTypes", card), set()).add(pool.zone)
    found: list[Problem] = []
    for (client, name), wanted in sorted(zones.items()):
        found += await _check_offered(api, client, name, wanted)
    return found


async def _check_offered(
    api: GceClient, client: str, name: str, wanted: set[str]
) -> Sequence[Problem]:
    pages = await api.pages(client, "aggregated_list", filter=f'name="{name}"')
    kinds, unseen = read_aggregated(pages, LISTED[client])
    offered = sorted({kind.zone.rpartition("/")[2] for kind in kinds})
    found = []
    for zone in sorted(wanted.difference(offered, unseen)):
        near = [one for one in offered if region_of(one) == region_of(zone)]
        cure = f"it is offered in {', '.join((near or offered)[:8])}"
        if not offered:
            cure = "no zone of this project offers it"
        found.append(Problem("provider.machines", f"{name} is not offered in {zone}", cure))
    return found


async def _check_quotas(
    api: GceClient, pools: Sequence[Pool], project: Limits
) -> Sequence[Problem]:
    found = []
    by_region = await limits_by_region(api, {region_of(pool.zone) for pool in pools})
    for pool in pools:
        region = region_of(pool.zone)
        limits = by_region[region]
        metric = quota_metric(pool, limits)
        if metric is not None and metric in limits and limits[metric][0] < pool.gpus:
            contract = "spot" if pool.spot else "on demand"
            what = f"{region} grants {limits[metric][0]:g} {pool.gpu} {contract} by {metric}"
            spare = f" or PREEMPTIBLE_{metric}" if pool.spot and "PREEMPT" not in metric else ""
            cure = f"{pool.machine} needs {pool.gpus}: ask for more of {metric}{spare} there"
            found.append(Problem("provider.zones", what, f"{cure} under IAM & Admin > Quotas"))
        elif not pool.spot and project.get(EVERY_GPU, (1e9, 0.0))[0] < pool.gpus:
            what = f"the project grants {project[EVERY_GPU][0]:g} GPUs on demand by {EVERY_GPU}"
            cure = "ask for more of it under IAM & Admin > Quotas"
            found.append(Problem("provider.project", what, cure))
    return found


async def limits_by_region(api: GceClient, regions: Iterable[str]) -> dict[str, Limits]:
    """Read the quotas of some regions."""
    return {
        region: read_limits((await api.call("Regions", "get", region=region)).quotas)
        for region in sorted(regions)
    }


def cure_of(failure: GceError, config: GceConfig) -> str:
    """Return what the user can do about a refusal; empty: nothing, or the text says it."""
    project = config.project
    match failure.kind:
        case "permission" if failure.status == 401:
            return LOGIN
        case "permission" if failure.code in NOT_ENABLED:
            return f"gcloud services enable compute.googleapis.com --project={project}"
        case "permission":
            return _permission_cure(failure.text, config)
        case "quota":
            return "ask for more of it under IAM & Admin > Quotas"
        case _:
            return ""


def _permission_cure(text: str, config: GceConfig) -> str:
    if "service account" in text.lower():
        cure = "let sailord's account use that of the instances: gcloud iam service-accounts"
        account = config.service_account or "ACCOUNT"
        binding = f"add-iam-policy-binding {account} --member=serviceAccount:NAME"
        return f"{cure} {binding} --role={MACHINE_ROLE}"
    member = f"--member=serviceAccount:NAME --role=projects/{config.project}/roles/{ROLE}"
    give = f"gcloud projects add-iam-policy-binding {config.project} {member}"
    lacks = re.search(r"'([a-z]+(?:\.[A-Za-z]+)+)'", text)
    if lacks is None:
        return f"give sailord's account the role of docs/gce.md: {give}"
    add = f"gcloud iam roles update {ROLE} --project={config.project} --add-permissions={lacks[1]}"
    return f"if sailord's account has the role of docs/gce.md: {add}; else: {give}"


def _problem_of(failure: GceError, config: GceConfig) -> Problem:
    """Return a failure as a problem of the configuration, else raise ``ProviderError``."""
    match failure.kind:
        case "permission":
            return Problem("provider.credentials", failure.text, cure_of(failure, config))
        case "bad_request" if failure.status == 404:
            what = f'this account sees no project "{config.project}" ({failure.text})'
            cure = "give the project's ID, not its name; `gcloud projects list` shows it"
            return Problem("provider.project", what, cure)
        case "bad_request":
            return Problem("provider", failure.text, "see docs/gce.md")
        case _:
            raise ProviderError(failure.text) from failure
