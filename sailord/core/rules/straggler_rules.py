"""Stragglers: found, planned around and marked; or kept, and why.

``straggler_detection`` finds them. A straggler is not simply left out: the planner is asked for the
best plan without it, and only if that is better than going on with it does the job change plan.
Then the node is marked, until an operator uncordons it or nothing can run without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from agents.protocol.records import NodeId, Order
from sailord.core.model.commands import Command, GiveOrder, Note
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Waiting
from sailord.core.model.rule import PASS, RuleAnswer, Step
from sailord.core.model.state import Active, KeptStraggler, OpenQuestion, State
from sailord.core.model.stragglers import Straggler
from sailord.core.queries.active_job import is_alive
from sailord.core.queries.straggler_queries import room_for_stragglers, undecided_stragglers


def decide_stragglers(state: State, active: Active) -> RuleAnswer:
    """Take marked stragglers back, or keep those that are too many to leave out."""
    if isinstance(active.phase, Waiting):
        return _readmit(state, active)
    return _keep_too_many(state, active) if is_alive(state, active) else PASS


def _keep_too_many(state: State, active: Active) -> RuleAnswer:
    """Keep the stragglers beyond ``left_out_share`` of all nodes."""
    found = list(undecided_stragglers(state, active).items())
    too_many = found and found[room_for_stragglers(state) :]  # Usually there are none.
    if not too_many:
        return PASS
    why = f"no more than {state.options.left_out_share:.0%} of all nodes are left out"
    return keep_stragglers(state, active, dict(too_many), why)


def keep_stragglers(
    state: State,
    active: Active,
    slow: Mapping[NodeId, Straggler],
    why: str,
    ask_again_s: float | None = None,
) -> Step:
    """Go on with stragglers, and say why; they are not asked about again for a while."""
    until = state.now + (state.options.reconsider_s if ask_again_s is None else ask_again_s)
    kept = {**active.slowness.kept, **{id_: KeptStraggler(until, why) for id_ in slow}}
    active = replace(active, slowness=replace(active.slowness, kept=kept), question=None)
    names = _stragglers(_name(state, id_) for id_ in slow)
    said = Note(f"keeps {names}: {why}", active.job, is_transition=True)
    return Step(replace(state, active=active), (said,))


def leave_out(state: State, question: OpenQuestion) -> tuple[State, tuple[Command, ...]]:
    """Mark the stragglers that the next plan leaves out; the mark is stored."""
    marked: dict[NodeId, Node] = {}
    orders: list[Order] = []
    assert state.active is not None
    number = 0 if state.active.generation is None else state.active.generation.number
    for id_, slow in question.slow.items():
        node = state.nodes[id_]
        marked[id_] = replace(node, exclusion=replace(node.exclusion, slow=str(slow)))
        id_of_order = f"slow-{id_}-{state.active.job}-{number}"
        orders.append(Order(id_of_order, "quarantine", target=id_, reason=str(slow)))
    return _issue(replace(state, nodes=state.nodes.with_(marked)), orders)


def _readmit(state: State, active: Active) -> RuleAnswer:
    """Take stragglers back if there is no plan without them."""
    if not active.asked.is_refused:
        return PASS
    slow = {id_: node for id_, node in state.nodes.items() if node.exclusion.slow}
    back = {
        id_: replace(node, exclusion=replace(node.exclusion, slow="")) for id_, node in slow.items()
    }
    back = {id_: node for id_, node in back.items() if node.is_usable(is_member=False)}
    if not back:
        return PASS
    number = 0 if active.generation is None else active.generation.number
    why = "there is no plan without it"
    orders = [
        Order(f"slow-back-{id_}-{active.job}-{number}", "uncordon", target=id_, reason=why)
        for id_ in back
    ]
    names = _stragglers(node.record.name for node in back.values())
    said = Note(f"uses {names} again: {why}", active.job, is_transition=True)
    after, commands = _issue(replace(state, nodes=state.nodes.with_(back)), orders)
    return Step(after, (*commands, said))


def _issue(state: State, orders: Sequence[Order]) -> tuple[State, tuple[Command, ...]]:
    """Issue orders about nodes, stored so that they hold under every leader."""
    marks = dict(state.marks)
    for order in orders:
        marks[order.target] = (*marks.get(order.target, ()), order)
    known = state.known_orders | {order.id for order in orders}
    return replace(state, marks=marks, known_orders=known), tuple(map(GiveOrder, orders))


def answer_to_slow(state: State, active: Active, question: OpenQuestion) -> Step | None:
    """Keep the stragglers that the question leaves out, unless a plan without them is better."""
    answer = question.answer
    if not question.slow or (answer is None and state.now < question.deadline):
        return None
    # The question about new nodes left the straggler out: they are asked about again with it.
    active = replace(active, asked=replace(active.asked, nodes=frozenset()))
    if any(id_ not in active.slowness.speeds.slow for id_ in question.slow):
        return keep_stragglers(state, active, question.slow, "it is no longer slow", 0.0)
    if answer is None:
        return keep_stragglers(state, active, question.slow, "the planner did not answer in time")
    if isinstance(answer, str):
        return keep_stragglers(
            state, active, question.slow, f"there is no plan without it: {answer}"
        )
    if not answer.is_worth_it:
        return keep_stragglers(state, active, question.slow, answer.why, answer.ask_again_s)
    return None


def _stragglers(names: Iterable[str]) -> str:
    found = list(names)
    return f"straggler{'s' * (len(found) > 1)} {', '.join(found)}"


def _name(state: State, id_: NodeId) -> str:
    node = state.nodes.get(id_)
    return id_ if node is None else node.record.name
