"""Losses are counted by pool, and node uptimes are known."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import NodeId, NodeRecord
from sailord.core.model.nodes import Node, Nodes
from sailord.core.model.state import State
from sailord.planning.machine_lifetimes import MachineLifetimes, pool_of
from tests.sailord.core.states import changed

RECORD = NodeRecord(NodeId("a.1"), "a", "z", "m", "A100-40", 2, "h:1", "ready", spot=True)
OTHER = replace(RECORD, id=NodeId("b.1"), name="b")


def state(now: float, *nodes: Node, term: int = 1) -> State:
    return State(now=now, term=term, nodes=Nodes({node.record.id: node for node in nodes}))


def test_losses_are_counted_once_by_pool():
    lifetimes, both = MachineLifetimes(), [Node(RECORD, 0.0), Node(OTHER, 5.0)]
    pool = pool_of(RECORD)
    assert pool == "A100-40@z spot"
    lifetimes.observe(state(10.0, *both))
    lifetimes.observe(state(10.5))  # Within OBSERVE_S: not counted.
    lifetimes.observe(state(20.0, both[0], changed(both[1], lost_at=19.0)))
    lifetimes.observe(state(30.0, both[0]))
    record = lifetimes.history.record(pool, 30.0)
    assert round(record.losses, 2) == 1.0
    assert record.nodes_up == 1
    assert dict(lifetimes.context(state(30.0, *both)).age_s) == {"a.1": 30.0, "b.1": 25.0}


def test_losses_are_not_counted_across_terms():
    lifetimes = MachineLifetimes()
    lifetimes.observe(state(10.0, Node(RECORD, 0.0)))
    lifetimes.observe(State(now=20.0))
    lifetimes.observe(state(30.0, term=2))
    assert lifetimes.history.record(pool_of(RECORD), 30.0).losses == 0


def test_what_is_given_back_or_drained_on_order_is_no_loss():
    """Otherwise a pool would seem to lose nodes whenever a job ends."""
    third = replace(RECORD, id=NodeId("c.1"), name="c")
    nodes = [Node(RECORD, 0.0), Node(OTHER, 0.0), Node(third, 0.0)]
    lifetimes, pool = MachineLifetimes(), pool_of(RECORD)
    lifetimes.observe(state(10.0, *nodes))
    lifetimes.given_back = lambda: {"a"}
    drained = changed(nodes[1], draining_since=11.0, is_drain_ordered=True)
    lifetimes.observe(state(20.0, nodes[0], drained, nodes[2]))
    assert lifetimes.history.record(pool, 20.0).nodes_up == 1
    lifetimes.observe(state(30.0, nodes[2]))
    assert lifetimes.history.record(pool, 30.0).losses == 0
    lifetimes.observe(state(40.0))
    assert round(lifetimes.history.record(pool, 40.0).losses, 2) == 1.0
