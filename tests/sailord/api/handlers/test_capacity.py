"""What the API, the CLI and metrics show of rented instances."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agents.protocol.codec import decode, encode, plain
from agents.protocol.records import NodeId, NodeRecord
from planner.move_policy.node_lifetimes import LifetimeHistory
from sailord.api.answers.problems import capacity_problems
from sailord.api.answers.types import CapacityGlance
from sailord.api.handlers.capacity import CapacityView, capacity_view, cooldowns_of, why_not_rented
from sailord.api.handlers.metrics import capacity_metrics, exposition
from sailord.capacity.core import model
from sailord.core.model.nodes import Node
from sailord.core.model.state import State
from sailord.providers.interface import Granted, QuotaUsage, Refused
from sailord.text.capacity_text import capacity_text
from sailord.text.cluster_text import glance_text
from tests.sailord.capacity.core.story import A, B, Story, instance

NAMED = NodeRecord(NodeId("by-hand.1"), "by-hand", "z", "m", "gpu", 4, "h:1", "ready")


def view_of(story: Story, *nodes: NodeRecord) -> CapacityView:
    state = State(term=1, nodes={node.id: Node(node, 0.0) for node in nodes})
    return capacity_view("gce", story.state, (A, B), state, LifetimeHistory())


@pytest.fixture
def story() -> Story:
    """Two wanted in zone-a, of which one is up and one awaited; zone-b has refused one."""
    story = Story(model.CapacityPolicy(usd_max=10.0, usd_per_hour_max=20.0)).see(1.0)
    story.hear(model.QuotasRead(1.0, (QuotaUsage("GPUS", (A, B), 16.0, 0.0),)))
    story.hear(model.TargetSet(1.0, {A: 2, B: 1}))
    first, second = sorted(story.state.asks.values(), key=lambda asked: asked.ask.pool)
    story.hear(
        model.RequestAnswered(2.0, Granted(first.ask.request_id, (instance(1), instance(2))))
    )
    story.hear(model.RequestAnswered(3.0, Refused(second.ask.request_id, "stockout", "none left")))
    story.hear(model.AgentsCounted(20.0, {"n1": model.Agent(4)}, frozenset({"n1"})))
    return story


def test_a_quarantined_instance_does_not_count_as_up(story):
    out = model.Agent(4, is_out=True)
    view = view_of(story.hear(model.AgentsCounted(30.0, {"n1": out})), NAMED)
    assert (view.pools[0].up, view.machines[0].state) == (0, "quarantined")


def test_the_view_shows_supply_target_and_cooldowns(story):
    view = view_of(story, NAMED)
    a, b = view.pools
    assert (a.wanted, a.up, a.awaited, a.asked, a.rest) == (2, 1, 1, 0, None)
    assert (b.wanted, b.up, b.awaited, b.asked, b.obtainable) == (1, 0, 0, 0, 0)
    assert b.rest is not None
    assert (b.rest.kind, b.rest.since, b.rest.until, b.rest.text) == (
        "stockout", 3.0, 63.0, "none left"
    )  # fmt: skip
    assert [(m.name, m.state, m.in_use, m.rented) for m in view.machines] == [
        ("m1", "up", True, True), ("m2", "awaited", False, True)
    ]  # fmt: skip
    assert view.strangers == ("by-hand",)
    assert [quota.used_gpus for quota in b.quotas] == [12.0], "what was asked for counts"
    assert view.money.usd_per_hour == pytest.approx(7.2)
    assert view.money.usd_left == pytest.approx(10.0 - view.money.spent_usd)
    assert view_of(story.hear(model.Tick(64.0))).pools[1].rest is None


def test_cooldowns_are_told_while_instances_are_missing(story):
    (rests,) = cooldowns_of(story.state)
    assert rests == "large in zone-b (spot) gets no request for 43.0 s (stockout): none left"
    assert cooldowns_of(replace(story.state, target={A: 2})) == ()
    assert cooldowns_of(replace(story.state, now=63.0)) == ()


def test_a_stopped_pool_says_why_and_what_ends_it(story):
    story.hear(model.Tick(621.0)).hear(model.AgentsCounted(700.0, {"n1": model.Agent(4)}))
    assert "stopped" not in capacity_text(plain(view_of(story)))
    boots = {A: model.BootRecord(A, True, 3, "as told")}
    story.state = replace(story.state, boots=boots)
    view = view_of(story)
    assert view.pools[0].stopped.startswith("3 instances in a row started no agent: as told; ")
    assert "large in zone-a (spot): stopped: 3 instances" in capacity_text(plain(view))
    assert 'sailor_pool_stopped{machine="large"' in exposition(capacity_metrics(view))


def test_an_orphan_is_an_instance_that_could_not_be_deleted(story):
    story.hear(model.TargetSet(30.0, {}))
    story.hear(model.Tick(331.0))
    assert view_of(story).orphans == ()
    story.hear(model.Tick(362.0)).hear(model.Tick(393.0))
    assert view_of(story).orphans == ("m2",)
    assert view_of(story).machines[1].state == "going"


def test_only_the_leader_shows_instances(story):
    view = capacity_view(
        "gce", story.hear(model.SteppedDown(30.0)).state, (A, B), State(), LifetimeHistory()
    )
    assert (view.leads, view.pools, view.machines) == (False, (), ())
    assert "no leader elected yet" in capacity_text(plain(view))
    alone = capacity_view(None, model.CapacityState(), (), State(term=1), LifetimeHistory())
    assert "no provider" in capacity_text(plain(alone))


def test_the_view_survives_encoding(story):
    view = view_of(story, NAMED)
    assert decode(CapacityView, encode(view)) == view


def test_the_text_of_capacity_shows_pools_cooldowns_and_cost(story):
    text = capacity_text(plain(view_of(story, NAMED)))
    for words in (
        "zone-a  large    spot           2   1         1          0          1  3.60",
        "large in zone-b (spot): cooldown until 1970-01-01 00:01:03+00:00 (stockout): none left",
        "quota GPUS: 12 of 16 GPUs used",
        "m2 is starting",
        "nodes not from this provider: by-hand",
        "$7.20/h of at most $20.00/h",
        "so far of at most $10.00",
    ):
        assert words in text, text


def test_why_nothing_is_rented_is_shown_only_while_nothing_is_wanted(story):
    loop: Any = SimpleNamespace(state=story.state, why_not_rented="no plan fits")
    assert why_not_rented(loop) == ""
    loop.state = story.hear(model.TargetSet(40.0, {A: 0, B: 0})).state
    assert why_not_rented(loop) == "no plan fits"
    assert why_not_rented(None) == ""
    text = capacity_text(plain(replace(view_of(story), why_not_rented=why_not_rented(loop))))
    assert "no instance is wanted, since there is no plan: no plan fits" in text


def test_each_pool_has_metrics(story):
    lines = exposition(capacity_metrics(view_of(story))).splitlines()
    label = 'machine="large",spot="true",zone="zone-b"'
    wanted = label.replace(",zone", ',state="wanted",zone')
    assert f"sailor_machines{{{wanted}}} 1.0" in lines
    assert f"sailor_pool_resting{{{label}}} 1.0" in lines
    assert f"sailor_machines_obtainable{{{label}}} 0.0" in lines
    assert "sailor_machines_orphaned 0.0" in lines


def test_status_and_doctor_summarise_capacity():
    glance = {"wanted": 3, "up": 1, "awaited": 1, "asked": 0, "resting": 1, "stopped": [],
              "usd_per_hour": 7.2,
              "spent_usd": 1.0, "stop": "", "orphans": ["m2"]}  # fmt: skip
    assert glance_text(glance, 0.0) == (
        "1 of 3 wanted are up, 1 starting, 1 pool in cooldown after a refusal; $7.20/h"
    )
    rests = glance | {"resting": 2, "rests_until": 1180.0}
    assert "2 pools in cooldown after a refusal, the first for 3 min more" in glance_text(
        rests, 1000.0
    )
    seen = CapacityGlance(**glance)
    assert [each.text.split()[0] for each in capacity_problems(seen)] == ["m2", "instances"]
    (spent,) = capacity_problems(replace(seen, stop="ended", orphans=(), resting=0))
    assert "capacity budget is spent" in spent.text
