"""What the loss of one given node would cost, by who keeps which pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import Holding, NodeId, Point, Sealed
from sailord.core.model.nodes import Node
from sailord.core.model.state import State
from sailord.core.queries.node_loss import NAMED_MAX, NOT_KNOWN, NodeLoss, node_losses
from sailord.core.queries.restore_choice import restore_now
from tests.sailord.core.states import (
    JOB,
    NOW,
    QUESTION,
    STARTING,
    A,
    B,
    C,
    D,
    active_of,
    durable,
    generation,
    job,
    node,
    report,
    state,
)

THREE = generation(A, B, C)


def keeps(id_: NodeId, *layers_at: tuple[int, tuple[int, ...]]) -> Node:
    """A node that keeps, of each step, these of the job's layers."""
    sealed = tuple(
        Sealed(Point(step, 3), tuple(Holding(layer, 0, 1) for layer in layers))
        for step, layers in layers_at
    )
    return node(id_, replace(report(id_), sealed=sealed))


def of_three_layers(*nodes: Node) -> State:
    """Each of a, b and c computes one layer; progress is at step 40."""
    return state(None, *nodes, job=job(layers=3), generation=THREE)


RING = (keeps(A, (40, (0, 2))), keeps(B, (40, (1, 0))), keeps(C, (40, (2, 1))))
"""Each keeps its own layer, and that of the node before it."""


def test_a_node_whose_pieces_are_on_others_costs_nothing_and_they_are_named() -> None:
    found = node_losses(of_three_layers(*RING))
    assert found == {
        A: NodeLoss(0, 40, "memory", (B, C), 2),
        B: NodeLoss(0, 40, "memory", (A, C), 2),
        C: NodeLoss(0, 40, "memory", (A, B), 2),
    }


def test_of_many_keepers_some_are_named_and_all_are_counted() -> None:
    """With wide data parallelism each node has hundreds: naming them all took 16 MB."""
    many = [NodeId(f"k{n}") for n in range(20)]
    found = node_losses(of_three_layers(*RING, *(keeps(id_, (40, (0,))) for id_ in many)))
    assert found[A] == NodeLoss(0, 40, "memory", (B, C, *sorted(many)[: NAMED_MAX - 2]), 22)
    assert found[B] == NodeLoss(0, 40, "memory", (A, C, *sorted(many)[: NAMED_MAX - 2]), 22)


def test_the_only_keeper_of_a_newer_piece_costs_the_steps_since_the_older_copy() -> None:
    """Layer 1 of step 40 is on b alone: its replica is still on its way to c."""
    nodes = (
        keeps(A, (38, (0, 2)), (40, (0, 2))),
        keeps(B, (38, (1, 0)), (40, (1, 0))),
        keeps(C, (38, (2, 1)), (40, (2,))),
    )
    found = node_losses(of_three_layers(*nodes))
    assert found[B] == NodeLoss(2, 38, "memory", (A, C), 2, is_only_keeper=True)
    assert found[A] == NodeLoss(0, 40, "memory", (B, C), 2)


def test_without_another_copy_the_job_goes_back_to_its_checkpoint_or_its_start() -> None:
    alone = of_three_layers(*(keeps(id_, (40, (n,))) for n, id_ in enumerate((A, B, C))))
    assert node_losses(alone)[B] == NodeLoss(40, 0, "start", is_only_keeper=True)
    kept = replace(alone, durables={JOB: durable(30)})
    assert node_losses(kept)[B] == NodeLoss(10, 30, "durable", is_only_keeper=True)


def test_an_unused_node_costs_nothing_while_the_job_trains() -> None:
    """But as long as the next generation fetches, its pieces may be the only ones."""
    nodes = (keeps(A, (40, (0,))), keeps(B, (40, (1,))), keeps(C, (40, (0,))), keeps(D, (40, (2,))))
    assert node_losses(of_three_layers(*nodes))[D] == NodeLoss(0, 40)
    planning = state(QUESTION, *nodes, job=job(layers=3), generation=THREE)
    assert node_losses(planning)[D] == NodeLoss(0, 40), "it trains on while a plan is made"
    fetching = state(STARTING, *nodes, job=job(layers=3), generation=THREE)
    assert node_losses(fetching)[D] == NodeLoss(40, 0, "start", is_only_keeper=True)


def test_a_node_that_keeps_nothing_of_the_job_costs_nothing_while_it_starts() -> None:
    """No step is kept anywhere yet: that is no reason to keep an idle node."""
    empty = of_three_layers(keeps(A), keeps(B), keeps(C), keeps(D))
    starting = state(STARTING, *empty.nodes.values(), job=job(layers=3), generation=THREE)
    assert node_losses(starting)[D] == NodeLoss(0, 40)
    assert node_losses(starting)[A] == NodeLoss(40, 0, "start")


def test_nothing_is_claimed_before_every_possible_keeper_has_reported() -> None:
    silent = replace(node(C), report=None)
    found = node_losses(of_three_layers(RING[0], RING[1], silent))
    assert found == {A: NOT_KNOWN, B: NOT_KNOWN, C: NOT_KNOWN}


def test_a_lost_node_and_a_cluster_without_a_job_have_no_losses() -> None:
    gone = node(D, report(D, sealed=()), lost_at=NOW - 1, why_lost="silent")
    assert D not in node_losses(of_three_layers(*RING, gone))
    assert node_losses(replace(of_three_layers(*RING), active=None)) == {}
    assert node_losses(state(None, *RING, generation=None)) == {}


@pytest.mark.parametrize("victim", [A, B, C])
def test_the_loss_is_what_the_controller_would_restore_without_the_node(victim: NodeId) -> None:
    nodes = (
        keeps(A, (38, (0, 2)), (40, (0,))),
        keeps(B, (38, (1, 0)), (39, (1, 0)), (40, (1, 0))),
        keeps(C, (38, (2,)), (40, (2, 1))),
    )
    before = replace(of_three_layers(*nodes), durables={JOB: durable(36)})
    left = [each for each in nodes if each.record.id != victim]
    dead = node(victim, report(victim), lost_at=NOW, why_lost="silent")
    after = replace(of_three_layers(*left, dead), durables=before.durables)
    restore, _ = restore_now(after, active_of(after))
    found = node_losses(before)[victim]
    assert (found.step, found.source) == (restore.point.step, restore.source)
    assert found.steps == 40 - restore.point.step
