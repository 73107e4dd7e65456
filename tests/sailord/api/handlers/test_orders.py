"""What the answer to an order says that follows."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agents.protocol.records import Order, OrderKind
from sailord.api.handlers.orders import store_order
from sailord.planning.precomputed import NoPlan
from tests.sailord.core.states import A, B, state


async def give(kind: OrderKind, target: str) -> dict[str, Any]:
    """Order something of a sailord that does not lead, and has no plan without node A."""

    async def give_order(_order: Order) -> str:
        return "new"

    known = replace(state(), term=None)
    none = {A: NoPlan("cluster: too small")}
    cluster = SimpleNamespace(
        state=known,
        last_led=known,
        led_parts=(known,),
        state_of=lambda _: known,
        following=none.get,
        tell_order=lambda _: None,
        read_store_soon=lambda: None,
    )
    api: Any = SimpleNamespace(cluster=cluster, gateway=SimpleNamespace(give_order=give_order))
    answer = await store_order(api, Order("one", kind, target))
    assert answer.status == 202, answer.text
    told: dict[str, Any] = json.loads(answer.text or "")
    return told


@pytest.mark.parametrize(
    ("kind", "target", "then"),
    [
        (
            "drain",
            A,
            "there is no plan without it: the job trains on there until it can use another",
        ),
        ("preempt", A, "there is no plan without it: once it ends, the job waits for another"),
        ("cordon", A, ""),
        ("drain", "machine-a", "there is no plan without it: the job trains on there"),
        ("drain", B, ""),
        ("preempt", "machine-b", ""),
    ],
)
async def test_what_a_node_without_a_substitute_means_is_told_at_once(
    kind: OrderKind, target: str, then: str
) -> None:
    told = await give(kind, target)
    assert told["then"].startswith(then)
    assert bool(told["then"]) == bool(then)
