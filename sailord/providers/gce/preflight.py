"""Checks the configuration against Google's API before anything is rented."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence

from sailord.providers.gce.client import GceClient
from sailord.providers.gce.config import DEFAULT_ACCOUNT, GceConfig, machine_shape, region_of
from sailord.providers.gce.cures import cure_of, permission_cure
from sailord.providers.gce.errors import GceError
from sailord.providers.gce.family_quotas import FamilyLimits, FamilyQuotas
from sailord.providers.gce.flex_template import check_template
from sailord.providers.gce.network_preflight import Finding, check_network, or_none
from sailord.providers.gce.observe import read_aggregated
from sailord.providers.gce.quotas import (
    EVERY_GPU,
    FAMILY,
    PREEMPTIBLE,
    QuotaLimits,
    family_of,
    limits_by_region,
    needs_families,
    quota_metric,
    read_limits,
)
from sailord.providers.gce.requests import CLUSTER_LABEL
from sailord.providers.interface import Pool, ProviderError
from simulator.documents.problems import Problem, Problems, nearest

ACT_AS = "iam.serviceAccounts.actAs"
IMAGE_NAME = re.compile(
    r"\bprojects/(?P<project>[^/]+)/global/images/(?P<family>family/)?(?P<name>[^/]+)\Z"
)
LISTED = {"MachineTypes": "machine_types", "AcceleratorTypes": "accelerator_types"}


async def check(api: GceClient, config: GceConfig, families: FamilyQuotas) -> Sequence[Problem]:
    """Check all that the configuration names.

    Raise ``InputError`` with every mistake; return what does not prevent renting.
    """
    problems, warnings = Problems(), list[Problem]()
    try:
        project = await api.call("Projects", "get")
        limits = read_limits(project.quotas)
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
    regions = sorted({region_of(pool.zone) for pool in pools})
    for findings, is_needed in (
        (_check_listing(api, config), True),
        (_check_machines(api, pools), True),
        (_check_quotas(api, pools, limits, families), True),
        # The cluster may work without the right to look at these.
        (check_network(api, config, regions), False),
        (_check_image(api, config), False),
        (_check_account(api, config, project.default_service_account), False),
        (_check_named(api, config, regions), False),
    ):
        try:
            async for problem, is_mistake in findings:
                (problems.found if is_mistake else warnings).append(problem)
        except GceError as failure:
            known = _problem_of(failure, config)
            if is_needed:
                problems.found.append(known)
            else:
                unchecked = f"cannot be checked: {known.what}"
                warnings.append(Problem(known.place, unchecked, known.cure))
    # One missing permission may cause several.
    problems.found = list(dict.fromkeys(problems.found))
    problems.raise_if_any()
    return tuple(dict.fromkeys(warnings))


async def _check_listing(api: GceClient, config: GceConfig) -> AsyncIterator[Finding]:
    rule = f'labels.{CLUSTER_LABEL}="{config.cluster_name}"'
    await api.pages("Instances", "aggregated_list", filter=rule)
    await api.pages("GlobalOperations", "aggregated_list", max_results=1, is_enough=lambda _: True)
    nothing: tuple[Finding, ...] = ()
    for finding in nothing:
        yield finding


async def _check_machines(api: GceClient, pools: Sequence[Pool]) -> AsyncIterator[Finding]:
    zones: dict[tuple[str, str], set[str]] = {}
    for pool in pools:
        machine, card, _ = machine_shape(pool.machine)
        zones.setdefault(("MachineTypes", machine), set()).add(pool.zone)
        if card:
            # Attached GPUs are offered per zone on their own.
            zones.setdefault(("AcceleratorTypes", card), set()).add(pool.zone)
    for (client, name), wanted in sorted(zones.items()):
        pages = await api.pages(client, "aggregated_list", filter=f'name="{name}"')
        kinds, unseen = read_aggregated(pages, LISTED[client])
        offered = sorted({kind.zone.rpartition("/")[2] for kind in kinds})
        for zone in sorted(wanted.difference(offered, unseen)):
            near = [one for one in offered if region_of(one) == region_of(zone)]
            cure = f"it is offered in {', '.join((near or offered)[:8])}"
            if not offered:
                cure = "no zone of this project offers it"
            yield Problem("provider.machines", f"{name} is not offered in {zone}", cure), True


async def _check_quotas(
    api: GceClient, pools: Sequence[Pool], project: QuotaLimits, families: FamilyQuotas
) -> AsyncIterator[Finding]:
    by_region = await limits_by_region(api, {region_of(pool.zone) for pool in pools})
    told = await families.limits() if needs_families(pools, by_region) else FamilyLimits()
    for pool in pools:
        region, contract, family = region_of(pool.zone), pool.contract, family_of(pool.gpu)
        limits = by_region[region]
        metric, usual = quota_metric(pool, limits), quota_metric(pool, {})
        if metric in limits:
            limit: float | None = limits[metric][0]
        else:
            limit, metric = told.limit(region, family), f"{FAMILY} of {family}"
        if limit is None:
            what = f"the quota of {pool.gpu} {contract} in {region} is unknown"
            asked = FamilyLimits() if family is None else told
            yield Problem("provider.machines", *asked.why_unknown(what, pool.gpu)), False
        elif limit < pool.gpus:
            what = f"{region} grants {limit:g} {pool.gpu} {contract} by {metric}"
            has_own = metric.startswith(PREEMPTIBLE) or not usual
            spare = f" or {PREEMPTIBLE}{usual}" if not (pool.is_on_demand or has_own) else ""
            cure = f"{pool.machine} needs {pool.gpus}: ask for more of {metric}{spare} there"
            yield Problem("provider.zones", what, f"{cure} under IAM & Admin > Quotas"), True
            continue
        if pool.is_on_demand and project.get(EVERY_GPU, (1e9, 0.0))[0] < pool.gpus:
            what = f"the project grants {project[EVERY_GPU][0]:g} GPUs on demand by {EVERY_GPU}"
            cure = "ask for more of it under IAM & Admin > Quotas"
            yield Problem("provider.project", what, cure), True


async def _check_image(api: GceClient, config: GceConfig) -> AsyncIterator[Finding]:
    named = IMAGE_NAME.search(config.image)
    if named is None:
        cure = "give projects/PROJECT/global/images/NAME, or .../images/family/FAMILY"
        yield Problem("provider.image", f'is "{config.image}"', cure), True
        return
    project, family, name = named["project"], named["family"], named["name"]
    method, key = ("get_from_family", "family") if family else ("get", "image")
    image = await or_none(api.call("Images", method, project=project, **{key: name}))
    list_them = f"gcloud compute images list --project={project}"
    if image is None:
        what = f'project {project} has no image{" family" if family else ""} "{name}"'
        yield Problem("provider.image", what, f"name one that `{list_them}` shows"), True
    elif image.deprecated.state in ("OBSOLETE", "DELETED"):
        what = f'image "{name}" is {image.deprecated.state.lower()}'
        newer = image.deprecated.replacement.rpartition("/")[2]
        yield Problem("provider.image", what, newer or f"name one of `{list_them}`"), True
    elif image.disk_size_gb > config.disk_gb:
        what = f"is {config.disk_gb}, and the image needs {image.disk_size_gb} GB"
        yield Problem("provider.disk_gb", what, f"set {image.disk_size_gb} or more"), True


async def _check_account(api: GceClient, config: GceConfig, default: str) -> AsyncIterator[Finding]:
    """Check that the account of the instances exists, and that sailord may use it."""
    account = config.service_account
    if account == DEFAULT_ACCOUNT:
        what = f'is "{account}": the project\'s default account may do much'
        cure = "make one with the least rights and name it (docs/gce.md)"
        if not default:
            what = f'is "{account}", and the project has no default account'
        yield Problem("provider.service_account", what, cure), not default
        return
    url = f"{config.iam_endpoint}/v1/projects/-/serviceAccounts/{account}:testIamPermissions"
    told = await or_none(api.post_json(url, {"permissions": [ACT_AS]}))
    if told is None:
        what = f'there is no service account "{account}"'
        make = f"gcloud iam service-accounts create {account.partition('@')[0]}"
        cure = f"`gcloud iam service-accounts list` shows them; {make} makes one (docs/gce.md)"
        yield Problem("provider.service_account", what, cure), True
    elif ACT_AS not in told.get("permissions", ()):
        what = f'sailord\'s account may not use the service account "{account}"'
        cure = permission_cure("service account", config)
        yield Problem("provider.service_account", what, cure), True


async def _check_named(
    api: GceClient, config: GceConfig, regions: Sequence[str]
) -> AsyncIterator[Finding]:
    """Check that placement policies, managed instance groups and reservations exist."""
    for region, policy in sorted(config.placement.items()):
        if region not in regions:
            continue
        fields = {"region": region, "resource_policy": policy}
        if await or_none(api.call("ResourcePolicies", "get", **fields)) is None:
            what = f'{region} has no placement policy "{policy}"'
            cure = "gcloud compute resource-policies create group-placement"
            yield Problem("provider.placement", what, f"{cure} {policy} --region={region}"), True
    for pool, group in sorted(config.groups.items()):
        fields = {"zone": pool.zone, "instance_group_manager": group}
        found = await or_none(api.call("InstanceGroupManagers", "get", **fields))
        if found is not None and pool.flex:
            async for finding in check_template(api, config, pool, found):
                yield finding
        elif found is None:
            what = f'{pool.zone} has no managed instance group "{group}"'
            cure = "`gcloud compute instance-groups managed list` shows them"
            yield Problem("provider.group", what, cure), True
    for pool, name in sorted(config.reservations.items()):
        reserved = await or_none(api.call("Reservations", "get", zone=pool.zone, reservation=name))
        shows = "`gcloud compute reservations list` shows them"
        if reserved is None:
            what = f'{pool.zone} has no reservation "{name}"'
            yield Problem("provider.reservation", what, shows), True
            continue
        kept = reserved.specific_reservation.instance_properties.machine_type
        machine, _, _ = machine_shape(pool.machine)
        if kept != machine:
            what = f'"{name}" in {pool.zone} is of {kept or "no machine type"}, not of {machine}'
            yield Problem("provider.reservation", what, shows), True


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
