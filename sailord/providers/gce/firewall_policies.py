"""Reads firewall policies, and in which order Google asks them and a network's own rules.

Policies of a folder or an organization come first, then those that Google itself keeps in a region.
Policies of the network come after its own rules, or before them where the network says so: global
ones, then those of the region where the packets arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network, ip_network
from typing import Any, Literal

from sailord.providers.gce.firewalls import FirewallRule, Tier, tcp_ports

ANYWHERE = IPv4Network("0.0.0.0/0")
OF_NETWORK, OF_REGION, BEFORE = "NETWORK", "NETWORK_REGIONAL", "BEFORE_CLASSIC_FIREWALL"
FIRST = {"HIERARCHY": 0, OF_NETWORK: 2, OF_REGION: 3}
"""In which order policies are asked, by their type; others are Google's own."""
_OTHER = tuple(
    f"{end}_{what}"
    for end in ("src", "dest")
    for what in (
        "address_groups", "fqdns", "region_codes", "threat_intelligences", "network_context",
        "network_type",
    )
)  # fmt: skip
"""What a rule may say of packets that their addresses do not tell here, at either end."""


def tiers(
    own: tuple[FirewallRule, ...],
    policies: Sequence[Any],
    network: str,
    account: str | None,
    *,
    order: str,
    region: str,
) -> tuple[Tier, ...]:
    """Return all that decides on packets to instances of a region in a network, in its order."""
    # Policies of a folder or an organization are listed in their order.
    listed = sorted(policies, key=lambda each: FIRST.get(each.type_, 1))
    above = [each for each in listed if each.type_ not in (OF_NETWORK, OF_REGION)]
    below = sorted(listed[len(above) :], key=lambda each: (each.type_, each.priority))
    found = [_tier(each, network, account, region) for each in above]
    later = [_tier(each, network, account, region) for each in below]
    rules = Tier("", own)
    return (*found, *later, rules) if order == BEFORE else (*found, rules, *later)


def _tier(policy: Any, network: str, account: str | None, region: str) -> Tier:
    # Effective policies of a region have no short name.
    name = getattr(policy, "short_name", "") or policy.display_name
    number = policy.name.rpartition("/")[2]
    match policy.type_:
        case "NETWORK":
            shown = f"network-firewall-policies describe {name or number} --global"
        case "NETWORK_REGIONAL":
            shown = f"network-firewall-policies describe {name or number} --region={region}"
        case _:
            shown = f"firewall-policies describe {number or name}"
    read = (_rule(each, network, account) for each in policy.rules)
    return Tier(shown, tuple(rule for rule in read if rule is not None))


def _rule(one: Any, network: str, account: str | None) -> FirewallRule | None:
    match, accounts = one.match, set(one.target_service_accounts)
    is_for_us = all((
        one.direction == "INGRESS",
        not one.disabled,
        # Instances that sailord makes have no secure tags.
        not one.target_secure_tags,
        not one.target_resources
        or any(each.endswith(f"/networks/{network}") for each in one.target_resources),
        not accounts or account is None or account in accounts,
    ))  # fmt: skip
    ports = tcp_ports((each.ip_protocol, each.ports) for each in match.layer4_configs)
    if not is_for_us or not ports:
        return None
    told = [getattr(match, name) for name in (*_OTHER, "src_networks", "dest_ip_ranges")]
    is_sure = not any(told) and not (accounts and account is None)
    by_tags = "other" if match.src_secure_tags else ""
    ranges = tuple(ip_network(text, strict=False) for text in match.src_ip_ranges)
    sources = tuple(each for each in ranges if isinstance(each, IPv4Network))
    if not ranges and not by_tags:
        sources = (ANYWHERE,)
    verdict: Literal["allow", "deny", "next"] = "allow"
    if one.action in ("deny", "goto_next"):
        verdict = "deny" if one.action == "deny" else "next"
    return FirewallRule(one.priority, verdict, ports, sources, by_tags, is_sure)
