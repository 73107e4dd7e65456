"""Says which ports a network's firewall closes between the nodes of a cluster.

Firewall policies and the network's own rules are looked at one after the other, as Google does: the
first rule that concerns a packet decides, unless it passes the packet on to what comes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from typing import Any, Literal

AGENT_PORT = 7078
RANK_PORTS = range(32768, 61000)
"""What Linux gives to programs that choose no port: ranks, their store and their connections."""
HEAD_TO_NODE = frozenset({AGENT_PORT})
NODE_TO_NODE = frozenset({AGENT_PORT, *RANK_PORTS})
ALL_PORTS = frozenset(range(1, 65536))


@dataclass(frozen=True, slots=True)
class FirewallRule:
    """A rule for TCP packets that reach the cluster's instances."""

    priority: int
    verdict: Literal["allow", "deny", "next"]
    """``next``: what comes after its policy decides."""
    ports: frozenset[int]
    sources: tuple[IPv4Network, ...]
    by_identity: str = ""
    """``""``: none; ``own``: from the cluster's instances by tag or account; ``other``."""
    is_sure: bool = True
    """Whether its addresses say which packets it concerns; else names, regions or lists do."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A firewall policy, or the network's own rules."""

    policy: str
    """How ``gcloud compute`` shows the policy; empty: the network's own rules."""
    rules: tuple[FirewallRule, ...]


def read_rules(
    resources: Iterable[Any], tags: Set[str], account: str | None
) -> tuple[FirewallRule, ...]:
    """Read the rules that concern instances with these tags and this account."""
    accounts = {account} - {None}
    found = []
    for one in resources:
        targets = {*one.target_tags, *one.target_service_accounts}
        if (
            one.direction != "INGRESS"
            or one.disabled
            or (targets and not targets & (tags | accounts))
        ):
            continue
        identities = {*one.source_tags, *one.source_service_accounts}
        by_identity = "own" if identities & (tags | accounts) else "other" if identities else ""
        ranges = (ip_network(text, strict=False) for text in one.source_ranges)
        sources = tuple(each for each in ranges if isinstance(each, IPv4Network))
        for is_allowed, protocols in ((True, one.allowed), (False, one.denied)):
            ports = tcp_ports((each.I_p_protocol, each.ports) for each in protocols)
            if ports:
                verdict: Literal["allow", "deny"] = "allow" if is_allowed else "deny"
                found.append(FirewallRule(one.priority, verdict, ports, sources, by_identity))
    return tuple(found)


def tcp_ports(protocols: Iterable[tuple[str, Sequence[str]]]) -> frozenset[int]:
    """Return the TCP ports of some protocols, each with its ports; none: all of them."""
    ports: set[int] = set()
    for protocol, given in protocols:
        if protocol not in ("tcp", "6", "all"):
            continue
        for text in given or ("1-65535",):
            first, _, last = text.partition("-")
            ports |= set(range(int(first), int(last or first) + 1))
    return frozenset(ports) & ALL_PORTS


def closed_ports(
    tiers: Sequence[Tier],
    source: IPv4Network,
    wanted: Set[int],
    *,
    is_node: bool,
    hopes: bool = True,
) -> Mapping[str, frozenset[int]]:
    """Return which wanted ports are closed to packets from a source, by the policy of a tier.

    ``hopes``: rules that are not sure open what they may open, and close nothing; otherwise the
    other way round. The tags of the head are unknown: a rule by tags may admit it.
    """
    closed: dict[str, set[int]] = {}
    left = set(wanted)
    for tier in tiers:
        passed = set[int]()
        # Among a network's own rules a deny wins over an allow of its priority.
        for rule in sorted(tier.rules, key=lambda rule: (rule.priority, rule.verdict != "deny")):
            hit = left & rule.ports
            if not hit or not _concerns(rule, source, is_node=is_node, hopes=hopes):
                continue
            left -= hit
            if rule.verdict == "deny":
                closed.setdefault(tier.policy, set()).update(hit)
            elif rule.verdict == "next":
                passed |= hit
        left |= passed
    closed.setdefault("", set()).update(left)
    return {policy: frozenset(ports) for policy, ports in closed.items() if ports}


def _concerns(rule: FirewallRule, source: IPv4Network, *, is_node: bool, hopes: bool) -> bool:
    if not rule.is_sure:
        return hopes == (rule.verdict != "deny")
    if rule.verdict == "deny":
        return rule.by_identity == "own" or any(source.overlaps(each) for each in rule.sources)
    is_meant = rule.by_identity == "own" or (bool(rule.by_identity) and not is_node)
    return is_meant or any(source.subnet_of(each) for each in rule.sources)


def ranges(ports: Set[int]) -> tuple[str, ...]:
    """Return ports as ranges."""
    found: list[list[int]] = []
    for port in sorted(ports):
        if found and found[-1][1] == port - 1:
            found[-1][1] = port
        else:
            found.append([port, port])
    return tuple(str(a) if a == b else f"{a}-{b}" for a, b in found)
