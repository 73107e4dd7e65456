"""Which ports a network's rules close between nodes."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest
from google.cloud.compute_v1 import Firewall

from sailord.providers.gce.firewalls import (
    NODE_TO_NODE,
    Tier,
    closed_ports,
    ranges,
    read_rules,
)

SUBNET = IPv4Network("10.128.0.0/20")
ALL = ("7078", "32768-60999")


def rule(*ports: str, deny: bool = False, protocol: str = "tcp", **changes) -> Firewall:
    """A rule that admits or refuses all addresses of the subnet."""
    list_ = [{"I_p_protocol": protocol, "ports": ports}]
    told = {"direction": "INGRESS", "priority": 1000, "denied" if deny else "allowed": list_}
    if not {"source_tags", "source_service_accounts"} & set(changes):
        told["source_ranges"] = ["10.128.0.0/9"]
    return Firewall({**told, **changes})


def closed(*resources: Firewall, is_node: bool = True) -> tuple[str, ...]:
    rules = read_rules(resources, {"sailor"}, "machine@p.iam")
    found = closed_ports([Tier("", rules)], SUBNET, NODE_TO_NODE, is_node=is_node)
    return ranges(found.get("", frozenset()))


@pytest.mark.parametrize(
    ("resources", "left"),
    [
        ([], ALL),
        ([rule()], ()),
        ([rule(protocol="all")], ()),
        ([rule(protocol="6")], ()),
        ([rule(protocol="udp")], ALL),
        ([rule("7078", "32768-60999")], ()),
        ([rule("7000-7100"), rule("32768-65535")], ()),
        ([rule("7078")], ("32768-60999",)),
        ([rule("1-40000")], ("40001-60999",)),
        ([rule(direction="EGRESS")], ALL),
        ([rule(disabled=True)], ALL),
        ([rule(source_ranges=["10.128.0.0/24"])], ALL),
        ([rule(source_ranges=["fd00::/8"])], ALL),
        ([rule(target_tags=["web"])], ALL),
        ([rule(target_tags=["web", "sailor"])], ()),
        ([rule(target_service_accounts=["machine@p.iam"])], ()),
        ([rule(source_tags=["sailor"])], ()),
        ([rule(source_tags=["head"])], ALL),
        ([rule(source_service_accounts=["machine@p.iam"])], ()),
        ([rule(), rule("7078", deny=True, priority=999)], ("7078",)),
        ([rule(), rule("7078", deny=True)], ("7078",)),
        ([rule(), rule("7078", deny=True, priority=1001)], ()),
        ([rule(), rule("7078", deny=True, priority=1, source_ranges=["10.128.1.0/24"])], ("7078",)),
        ([rule(), rule(deny=True, priority=1, source_ranges=["10.200.0.0/16"])], ()),
    ],
)
def test_ports_that_no_rule_admits_are_closed(resources, left):
    assert closed(*resources) == left


def test_a_rule_by_tags_may_admit_the_head():
    assert closed(rule(source_tags=["head"]), is_node=False) == ()
    assert closed(is_node=False) == ALL
