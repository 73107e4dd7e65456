"""Says which ports a network's firewall rules close between the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from typing import Any

AGENT_PORT = 7078
RANK_PORTS = range(32768, 61000)
"""What Linux gives to programs that choose no port: ranks, their store and their connections."""
HEAD_TO_NODE = frozenset({AGENT_PORT})
NODE_TO_NODE = frozenset({AGENT_PORT, *RANK_PORTS})
ALL_PORTS = frozenset(range(1, 65536))


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for TCP packets that reach the cluster's instances."""

    priority: int
    is_allowed: bool
    ports: frozenset[int]
    sources: tuple[IPv4Network, ...]
    by_identity: str
    """``""``: none; ``own``: from the cluster's instances by tag or account; ``other``."""


def read_rules(resources: Iterable[Any], tags: Set[str], account: str | None) -> tuple[Rule, ...]:
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
            ports = _tcp_ports(protocols)
            if ports:
                found.append(Rule(one.priority, is_allowed, ports, sources, by_identity))
    return tuple(found)


def _tcp_ports(protocols: Iterable[Any]) -> frozenset[int]:
    ports: set[int] = set()
    for one in protocols:
        if one.I_p_protocol not in ("tcp", "6", "all"):
            continue
        for text in one.ports or ("1-65535",):
            first, _, last = text.partition("-")
            ports |= set(range(int(first), int(last or first) + 1))
    return frozenset(ports) & ALL_PORTS


def closed_ports(
    rules: Sequence[Rule], source: IPv4Network, wanted: Set[int], *, is_node: bool
) -> tuple[str, ...]:
    """Return which wanted ports are closed to packets from a source, as ranges.

    The tags of the head are unknown: a rule by tags may admit it.
    """
    left, closed = set(wanted), set[int]()
    # A deny wins over an allow of its priority.
    for rule in sorted(rules, key=lambda rule: (rule.priority, rule.is_allowed)):
        is_meant = rule.by_identity == "own" or (bool(rule.by_identity) and not is_node)
        if rule.is_allowed:
            if is_meant or any(source.subnet_of(each) for each in rule.sources):
                left -= rule.ports
        elif rule.by_identity == "own" or any(source.overlaps(each) for each in rule.sources):
            closed |= left & rule.ports
            left -= rule.ports
    return _ranges(closed | left)


def _ranges(ports: Set[int]) -> tuple[str, ...]:
    found: list[list[int]] = []
    for port in sorted(ports):
        if found and found[-1][1] == port - 1:
            found[-1][1] = port
        else:
            found.append([port, port])
    return tuple(str(a) if a == b else f"{a}-{b}" for a, b in found)
