"""Checks network, subnets, firewall rules and the way out, before anything is rented."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence, Set
from dataclasses import replace
from ipaddress import IPv4Network
from typing import Any

from sailord.providers.gce.client import GceClient
from sailord.providers.gce.config import DEFAULT_ACCOUNT, GceConfig
from sailord.providers.gce.errors import GceError
from sailord.providers.gce.firewall_policies import tiers
from sailord.providers.gce.firewalls import (
    HEAD_TO_NODE,
    NODE_TO_NODE,
    Tier,
    closed_ports,
    ranges,
    read_rules,
)
from simulator.documents.problems import Problem

NOT_FOUND = 404
Finding = tuple[Problem, bool]
"""A problem, and whether it prevents renting."""


async def or_none(asked: Any) -> Any:
    """Await a call; return ``None`` where Google does not find what was asked for."""
    try:
        return await asked
    except GceError as failure:
        if failure.status != NOT_FOUND:
            raise
        return None


async def check_network(
    api: GceClient, config: GceConfig, regions: Sequence[str]
) -> AsyncIterator[Finding]:
    """Check that instances get an address, that nodes reach each other, and that they get out."""
    network = await or_none(api.call("Networks", "get", network=config.network))
    if network is None:
        what = f'project {config.project} has no network "{config.network}"'
        cure = "name one that `gcloud compute networks list` shows, or make one:"
        cure += f" gcloud compute networks create {config.network} --subnet-mode=auto"
        yield Problem("provider.network", what, f"{cure} --project={config.project}"), True
        return
    name = config.subnetwork or config.network
    if config.subnetwork is None and not network.auto_create_subnetworks:
        what = f'network "{config.network}" has no automatic subnets'
        cure = "name that of each region as provider.subnetwork: `gcloud compute networks subnets"
        yield Problem("provider.subnetwork", what, f"{cure} list` shows them"), True
        return
    subnets = []
    for region in regions:
        subnet = await or_none(api.call("Subnetworks", "get", region=region, subnetwork=name))
        if subnet is None:
            what = f'{region} has no subnet "{name}"'
            make = f"gcloud compute networks subnets create {name} --network={config.network}"
            cure = f"make it: {make} --region={region} --range=..., or leave its zones out"
            yield Problem("provider.subnetwork", what, cure), True
        elif subnet.network.rpartition("/")[2] != config.network:
            other = subnet.network.rpartition("/")[2]
            what = f'subnet "{name}" of {region} belongs to network "{other}"'
            yield Problem("provider.subnetwork", what, f'set provider.network = "{other}"'), True
        else:
            subnets.append((region, subnet))
    async for found in _check_way_out(api, config, subnets):
        yield found
    order = network.network_firewall_policy_enforcement_order
    async for found in _check_firewalls(api, config, subnets, order):
        yield found


async def _check_firewalls(
    api: GceClient, config: GceConfig, subnets: Sequence[tuple[str, Any]], order: str
) -> AsyncIterator[Finding]:
    """Check all rules and policies of each region: they decide on packets that arrive there."""
    account = None if config.service_account == DEFAULT_ACCOUNT else config.service_account
    sources = [IPv4Network(subnet.ip_cidr_range) for _, subnet in subnets]
    ways = [(f"from nodes in {each}", each, NODE_TO_NODE, True) for each in sources]
    if config.head_ip is not None:
        head = IPv4Network(config.head_ip)
        if not any(head.subnet_of(each) for each in sources):
            ways.append((f"from sailord at {config.head_ip}", head, HEAD_TO_NODE, False))
    regions: dict[Finding, list[str]] = {}
    for region, _ in subnets:
        told = await api.call(
            *("RegionNetworkFirewallPolicies", "get_effective_firewalls"),
            region=region,
            network=f"projects/{config.project}/global/networks/{config.network}",
        )
        own = read_rules(told.firewalls, frozenset(config.tags), account)
        policies = told.firewall_policys
        asked = tiers(own, policies, config.network, account, order=order, region=region)
        for what, source, wanted, is_node in ways:
            for problem in _find_closed(config, asked, what, source, wanted, is_node=is_node):
                # Policies have more kinds of rules than are understood here.
                regions.setdefault((problem, not policies), []).append(region)
    for (problem, is_mistake), found in regions.items():
        where = "" if len(found) == len(subnets) else f" in {', '.join(found)}"
        yield replace(problem, what=f"{problem.what} to nodes{where}"), is_mistake


def _find_closed(
    config: GceConfig,
    asked: Sequence[Tier],
    what: str,
    source: IPv4Network,
    wanted: Set[int],
    *,
    is_node: bool,
) -> Iterator[Problem]:
    """Yield what is closed, and then what a rule may close that cannot be told here.

    Where the packets arrive is left to be added.
    """
    sure = closed_ports(asked, source, wanted, is_node=is_node)
    maybe = closed_ports(asked, source, wanted, is_node=is_node, hopes=False)
    known = frozenset[int]().union(*sure.values())
    left = {policy: ports - known for policy, ports in maybe.items()}
    for found, verb in ((sure, "close"), (left, "may close")):
        for policy, ports in found.items():
            if policy and ports:
                where = f"firewall policy {policy.split()[2]} {verb}{'s' * (verb == 'close')}"
                cure = f"admit them in it: gcloud compute {policy}"
            elif ports:
                where, cure = (
                    f'rules of network "{config.network}" {verb}',
                    _rule_for(config, ports),
                )
                cure += f" --source-ranges={source}"
                cure += f" --target-tags={','.join(config.tags)}" if config.tags else ""
                cure += "" if found is sure else ", unless a firewall policy already admits them"
            else:
                continue
            told = f"the {where} TCP {', '.join(ranges(ports))} {what}"
            yield Problem("provider.network", told, cure)


def _rule_for(config: GceConfig, ports: Set[int]) -> str:
    rule = f"gcloud compute firewall-rules create sailor-nodes --network={config.network}"
    return f"{rule} --allow={','.join(f'tcp:{each}' for each in ranges(ports))}"


async def _check_way_out(
    api: GceClient, config: GceConfig, subnets: Sequence[tuple[str, Any]]
) -> AsyncIterator[Finding]:
    if config.external_ip:
        return
    for region, subnet in subnets:
        pages = await api.pages("Routers", "list", region=region)
        routers = [router for page in pages for router in page.items]
        if any(_translates(router, config.network, subnet) for router in routers):
            continue
        nat = f"gcloud compute routers create sailor --network={config.network} --region={region}"
        nat += f" && gcloud compute routers nats create sailor --router=sailor --region={region}"
        nat += " --auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges"
        what = f"instances in {region} have no external address, and its subnet has no Cloud NAT"
        if config.package:
            # pip downloads torch from the Internet.
            cure = f"set external_ip = true, use an image with the agent (no package), or: {nat}"
            yield (
                Problem("provider.external_ip", f"{what}: they reach no package index", cure),
                True,
            )
        elif not subnet.private_ip_google_access:
            what += " and no Private Google Access: they cannot read the cluster's key"
            name = f"{subnet.name} --region={region}"
            access = (
                f"gcloud compute networks subnets update {name} --enable-private-ip-google-access"
            )
            yield Problem("provider.external_ip", what, f"{access}, or: {nat}"), True


def _translates(router: Any, network: str, subnet: Any) -> bool:
    if router.network.rpartition("/")[2] != network:
        return False
    return any(
        nat.source_subnetwork_ip_ranges_to_nat.startswith("ALL_SUBNETWORKS")
        or any(one.name.rpartition("/")[2] == subnet.name for one in nat.subnetworks)
        for nat in router.nats
    )
