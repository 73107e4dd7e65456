"""Lost nodes stay listed until they, or others of their kind, are there again."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import NodeId
from sailord.controller.lost_nodes import LISTED_MAX, LISTED_S, UNUSED, LostNodes
from sailord.core.model.nodes import Node, Nodes
from sailord.core.model.state import State
from tests.sailord.core.states import NOW, A, B, C, D, changed, node, record
from tests.sailord.core.states import state as state_of

GONE = node(A, lost_at=NOW, why_lost="no lease")


def seen(*states: tuple[Node, ...], known: LostNodes | None = None) -> LostNodes:
    """What is listed after these nodes were there, one state after another."""
    known = LostNodes() if known is None else known
    for nodes in states:
        known.observe(replace(state_of(None), nodes=Nodes({n.record.id: n for n in nodes})))
    return known


def names(known: LostNodes, now: float = NOW) -> list[str]:
    return [each.name for each in known.of(now)]


def test_a_lost_node_is_listed_after_its_record_is_gone_for_a_day() -> None:
    known = seen((node(A), node(B)), (GONE, node(B)), (node(B),))
    (lost,) = known.of(NOW)
    assert (lost.name, lost.at, lost.why) == ("machine-a", NOW, "no lease")
    assert names(known, NOW + LISTED_S - 1) == ["machine-a"]
    assert names(known, NOW + LISTED_S) == []


def test_a_node_that_no_job_used_is_listed_too() -> None:
    (lost,) = seen((node(A), node(B)), (node(B),)).of(NOW)
    assert (lost.name, lost.why) == ("machine-a", UNUSED)


def test_a_node_that_is_back_is_listed_no_more() -> None:
    again = node(NodeId("a2"), record=record(NodeId("a2"), name="machine-a"))
    lost = (node(A), node(B)), (GONE, node(B)), (node(B),)
    assert names(seen(*lost, (node(B), again))) == []
    assert names(seen((node(A),), (GONE,), (node(A),))) == [], "it was given up by mistake"
    assert names(seen((node(A),), (GONE, again))) == [], "its agent was restarted"


def test_a_node_that_was_renamed_is_not_lost() -> None:
    """It joins by its new name before the lease of the old one ends."""
    renamed = node(D, record=record(D, address=record(A).address))
    assert names(seen((node(A), node(B)), (node(A), node(B), renamed), (node(B), renamed))) == []


def test_another_node_of_its_kind_replaces_one() -> None:
    both = (node(A), node(B), node(C)), (GONE, node(B, lost_at=NOW), node(C)), (node(C),)
    assert names(seen(*both)) == ["machine-a", "machine-b"]
    assert names(seen(*both, (node(C), node(D)))) == ["machine-b"]
    other = node(D, record=record(D, machine="another"))
    assert names(seen(*both, (node(C), other))) == ["machine-a", "machine-b"]


def test_a_node_that_was_replaced_is_not_listed_anew_when_its_lease_ends() -> None:
    replaced = (node(A),), (GONE,), (GONE, node(D))
    assert names(seen(*replaced, (changed(GONE, absent_since=NOW), node(D)))) == []


def test_what_is_rented_is_asked_once_for_all_that_are_lost() -> None:
    asked: list[int] = []
    known = LostNodes(rented=lambda: asked.append(1) or {"machine-a"})
    both = node(A, lost_at=NOW), node(B, lost_at=NOW)
    assert names(seen((node(A), node(B)), both, known=known)) == ["machine-b"]
    assert len(asked) == 1, "thousands of names are put together for it"


def test_nodes_that_are_expected_to_go_are_not_listed() -> None:
    spot = node(A, record=record(A, spot=True))
    assert names(seen((spot, node(B)), (node(B),))) == []
    assert names(seen((node(A, draining_since=NOW), node(B)), (node(B),))) == []
    rented = LostNodes(rented=lambda: {"machine-a"})
    assert names(seen((node(A), node(B)), (GONE, node(B)), known=rented)) == []


def test_a_node_that_is_lost_on_its_way_to_another_job_is_listed() -> None:
    assert names(seen((node(A, yields_since=NOW), node(B)), (node(B),))) == ["machine-a"]


def test_another_leader_lists_only_what_it_saw() -> None:
    known = seen((node(A), node(B)), (GONE, node(B)))
    known.observe(State())
    assert names(known) == []
    known.observe(replace(state_of(None), nodes=Nodes({B: node(B)})))
    assert names(known) == [], "it saw none of them before"


def test_the_list_is_bounded() -> None:
    many = [NodeId(f"n{n:03}") for n in range(LISTED_MAX + 1)]
    up = tuple(node(id_, record=record(id_, name=id_)) for id_ in many)
    gone = tuple(changed(each, lost_at=NOW, why_lost="no lease") for each in up)
    assert names(seen(up, gone)) == many[1:]
