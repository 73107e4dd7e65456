"""Nodes whose bits most other ranks contradicted: no new generation uses them.

Ranks that train the same pieces hold the same bits. If most contradict one, its node computed or
kept something wrong without an error, and may do so again. It is left out until an operator
uncordons it. At most a quarter of the nodes, and at least one, can be left out: where more are
contradicted, the software is likelier wrong than the nodes.
"""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import GenerationRecord, NodeId, Order
from sailord.core.model.commands import GiveOrder, Note
from sailord.core.model.rule import PASS, RuleAnswer, Step
from sailord.core.model.state import Active, State
from sailord.core.queries.replan_triggers import without_rank


def quarantine_contradicted(state: State, active: Active) -> RuleAnswer:
    """Leave out the next node that members of the generation contradict."""
    generation = active.generation
    if generation is None:
        return PASS
    found = _find_contradicted(state, generation)
    if found is None:
        return PASS
    id_of_order, id_, failure = found
    node = state.nodes[id_]
    state = replace(state, known_orders=state.known_orders | {id_of_order})
    if _is_full(state):
        why = "one node, or a quarter of all, is left out already; the software may be at fault"
        text = f"{node.record.name} stays although its bits were contradicted: {why}"
        return Step(state, (Note(text, active.job, is_transition=True),))
    back = f"`sailorctl uncordon {node.record.name}` returns it"
    reason = f"its bits were contradicted ({without_rank(failure)}); {back}"
    order = Order(id_of_order, "quarantine", target=id_, reason=reason, wrong_bits=True)
    marks = {**state.marks, id_: (*state.marks.get(id_, ()), order)}
    marked = replace(node, exclusion=replace(node.exclusion, wrong_bits=reason))
    nodes = state.nodes.with_({id_: marked})
    said = Note(f"{node.record.name} is quarantined: {reason}", active.job, is_transition=True)
    return Step(replace(state, nodes=nodes, marks=marks), (GiveOrder(order), said))


def _find_contradicted(
    state: State, generation: GenerationRecord
) -> tuple[str, NodeId, str] | None:
    """Return a contradicted member that was not decided about, the order's id and the failure."""
    for by in sorted(state.nodes.notable.intersection(generation.members)):
        report = state.nodes[by].report
        if report is None or not report.speaks_of(generation):
            continue
        for id_ in report.contradicted:
            node = state.nodes.get(id_)
            id_of_order = f"bits-{id_}-{generation.job}-{generation.number}"
            is_new = id_of_order not in state.known_orders
            if is_new and id_ in generation.members and node is not None and not node.is_lost:
                return id_of_order, id_, report.failure
    return None


def _is_full(state: State) -> bool:
    """Return whether no further node may be left out; one always may be."""
    living = [node for node in state.nodes.values() if not node.is_lost]
    out = sum(bool(node.exclusion.wrong_bits) for node in living)
    return out >= max(1, int(state.options.left_out_share * len(living)))
