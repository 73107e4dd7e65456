"""Which ranks of a plan a node has, and on which of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import NodeId
from simulator.documents.files import parse_document
from simulator.inputs.plan_file import plan_from_document
from worker.layout.rank_layout import rank_places


@dataclass(frozen=True, slots=True)
class Seating:
    """One node's part in a plan."""

    ranks: int
    """Of the whole plan."""
    devices: dict[int, int]
    """For each rank of this node, in their order, its device."""
    first: NodeId | None
    """Where rank 0 is; ``None``: the plan does not say."""


def read_seating(plan_text: str, node: NodeId) -> Seating:
    """Read the node's part from a stored plan; ``InputError`` says what is wrong with it."""
    plan = plan_from_document(parse_document(plan_text.encode(), name="plan"))
    devices: dict[int, int] = {}
    first: NodeId | None = None
    seats = rank_places(plan)
    for seat in seats:
        place = plan.pipelines[seat.pipeline].stages[seat.stage].places[0]
        if seat.rank == 0 and place.node is not None:
            first = NodeId(place.node)
        if place.node == node:
            devices[seat.rank] = place.devices[seat.index] if place.devices else len(devices)
    return Seating(len(seats), devices, first)
