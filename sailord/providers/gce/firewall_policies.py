"""Reads firewall policies, and in which order Google asks them and a network's own rules.

Policies of a folder or an organization come first. Those of the network come after its own rules,
or before them where the network says so. Regional policies of the network are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network, ip_network
from typing import Any, Literal

from sailord.providers.gce.firewalls import Rule, Tier, tcp_ports

ANYWHERE = IPv4Network("0.0.0.0/0")
HIERARCHY, OF_NETWORK, BEFORE = "HIERARCHY", "NETWORK", "BEFORE_CLASSIC_FIREWALL"
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
    own: tuple[Rule, ...],
    policies: Sequence[Any],
    network: str,
    account: str | None,
    *,
    order: str,
) -> tuple[Tier, ...]:
    """Return all that decides on packets to instances in a network, first things first."""
    of_network = sorted(
        (each for each in policies if each.type_ == OF_NETWORK), key=lambda each: each.priority
    )
    above = [each for each in policies if each.type_ == HIERARCHY]
    above += [each for each in policies if each.type_ not in (HIERARCHY, OF_NETWORK)]
    found = [_tier(each, network, account) for each in above]
    later = [_tier(each, network, account) for each in of_network]
    rules = Tier("", own)
    return (*found, *later, rules) if order == BEFORE else (*found, rules, *later)


def _tier(policy: Any, network: str, account: str | None) -> Tier:
    name = policy.short_name or policy.display_name or policy.name.rpartition("/")[2]
    shown = f"network-firewall-policies describe {name} --global"
    if policy.type_ != OF_NETWORK:
        shown = f"firewall-policies describe {policy.name.rpartition('/')[2] or name}"
    read = (_rule(each, network, account) for each in policy.rules)
    return Tier(shown, tuple(rule for rule in read if rule is not None))


def _rule(one: Any, network: str, account: str | None) -> Rule | None:
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
    return Rule(one.priority, verdict, ports, sources, by_tags, is_sure)
