"""Stragglers: found, planned around and marked; or kept, and why.

What slow means is decided by ``straggling``. A node found slow is not simply left out: the planner
is asked what is best without it, and only if that is better than going on with it, slow as it is,
does the job stop at a step's end and move. Then the node is marked until somebody gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agents.protocol.records import GenerationRecord, Intent, NodeId
from sailord.core.commands import Command, GiveIntent, Note
from sailord.core.nodes import Node
from sailord.core.options import Options
from sailord.core.phases import Running
from sailord.core.rule import PASS, RuleAnswer, Step
from sailord.core.state import Active, KeptStraggler, Question, Slowness, State
from sailord.core.straggler_detection import Limits, Sample, Speeds, Straggler, look, worst

LOOK_S = 1.0
"""Seconds between two comparisons of speeds."""


def limits_of(options: Options) -> Limits:
    """Return when a node counts as a straggler."""
    return Limits(options.slow_times, options.slow_steps, options.slow_s)


def watched(state: State) -> State:
    """Compare the speeds of the nodes that train, every ``LOOK_S``."""
    active = state.active
    if active is None or active.generation is None or active.generation.busy is None:
        return state
    number, busy = active.generation.number, active.generation.busy
    is_new = active.slowness.speeds.generation != number
    if not is_new and state.now < active.slowness.speeds.looked_at + LOOK_S:
        return state
    if not isinstance(active.phase, Running):
        return state
    before = Speeds(number, active.progress.step) if is_new else active.slowness.speeds
    watch = look(
        before,
        _samples(state, active.generation),
        now=state.now,
        relative_error=busy.relative_error,
        limits=limits_of(state.options),
    )
    kept = {id_: each for id_, each in active.slowness.kept.items() if state.now < each.until}
    return replace(state, active=replace(active, slowness=Slowness(watch, kept)))


def _samples(state: State, generation: GenerationRecord) -> dict[NodeId, Sample]:
    """Return the measurements of the members that train."""
    assert generation.busy is not None
    predicted, found = generation.busy.seconds, {}
    for id_ in generation.members:
        node = state.nodes.get(id_)
        report = None if node is None else node.report
        if node is None or report is None or report.taking != "running":
            continue
        if not report.speaks_of(generation):
            continue
        ranks = ((s, predicted[rank]) for rank, s in report.busy if rank < len(predicted))
        slowest = worst(ranks)
        if slowest is not None:
            found[id_] = Sample(node.record.gpu, report.step, slowest[1], slowest[0])
    return found


def to_leave_out(state: State, active: Active) -> dict[NodeId, Straggler]:
    """Return the stragglers to plan around, up to ``slow_share`` of all nodes."""
    found = _undecided(state, active)
    return dict(list(found.items())[: _room(state)]) if found else {}


def _undecided(state: State, active: Active) -> dict[NodeId, Straggler]:
    """Return stragglers that were not yet decided about, slowest first."""
    if not active.slowness.speeds.slow or not isinstance(active.phase, Running):
        return {}
    if active.generation is None or active.slowness.speeds.generation != active.generation.number:
        return {}
    found = active.slowness.speeds.found(state.now, limits_of(state.options))
    return {id_: slow for id_, slow in found.items() if id_ not in active.slowness.kept}


def _room(state: State) -> int:
    """Return how many more nodes may be left out."""
    living = [node for node in state.nodes.values() if not node.is_lost]
    most = int(state.options.slow_share * len(living))
    return max(most - sum(bool(node.slow) for node in living), 0)


def keep_too_many(state: State, active: Active) -> RuleAnswer:
    """Keep the stragglers beyond ``slow_share`` of all nodes."""
    undecided = list(_undecided(state, active).items())
    found = (
        undecided and undecided[_room(state) :]
    )  # Usually empty: then skip the count of all nodes.
    if not found:
        return PASS
    why = f"no more than {state.options.slow_share:.0%} of all nodes are left out"
    return keep(state, active, dict(found), why)


def keep(
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
    names = ", ".join(_name(state, id_) for id_ in slow)
    told = f"stays with {names}, slow as it is: {why}"
    said = Note(told, active.job, is_transition=True)
    return Step(replace(state, active=active), (said,))


def leave_out(state: State, question: Question) -> tuple[State, tuple[Command, ...]]:
    """Mark the stragglers that the next plan leaves out; the mark is stored."""
    marked: dict[NodeId, Node] = {}
    intents: list[Intent] = []
    assert state.active is not None
    number = 0 if state.active.generation is None else state.active.generation.number
    for id_, slow in question.slow.items():
        marked[id_] = replace(state.nodes[id_], slow=str(slow))
        intents.append(Intent(f"slow-{id_}-{number}", "quarantine", id_, None, str(slow)))
    return _said(replace(state, nodes=state.nodes.with_(marked)), intents)


def take_back(state: State, active: Active) -> RuleAnswer:
    """Take stragglers back if there is no plan without them."""
    if not active.asked.is_refused:
        return PASS
    slow = {id_: node for id_, node in state.nodes.items() if node.slow}
    back = {id_: replace(node, slow="") for id_, node in slow.items()}
    back = {id_: node for id_, node in back.items() if node.is_usable(is_member=False)}
    if not back:
        return PASS
    number = 0 if active.generation is None else active.generation.number
    why = "there is no plan without it"
    intents = [Intent(f"slow-back-{id_}-{number}", "uncordon", id_, None, why) for id_ in back]
    names = ", ".join(node.record.name for node in back.values())
    said = Note(f"takes back {names}, slow as it is: {why}", active.job, is_transition=True)
    after, orders = _said(replace(state, nodes=state.nodes.with_(back)), intents)
    return Step(after, (*orders, said))


def _said(state: State, intents: Sequence[Intent]) -> tuple[State, tuple[Command, ...]]:
    """Issue orders about nodes, stored so that they hold under every leader."""
    marks = dict(state.marks)
    for intent in intents:
        marks[intent.target] = (*marks.get(intent.target, ()), intent)
    known = state.intents | {intent.id for intent in intents}
    return replace(state, marks=marks, intents=known), tuple(map(GiveIntent, intents))


def answer_to_slow(state: State, active: Active, question: Question) -> Step | None:
    """Keep the stragglers that the question leaves out, unless a plan without them is better."""
    answer = question.answer
    if not question.slow or (answer is None and state.now < question.deadline):
        return None
    if any(id_ not in active.slowness.speeds.slow for id_ in question.slow):
        return keep(state, active, question.slow, "it is as fast as it should be again", 0.0)
    if answer is None:
        return keep(state, active, question.slow, "the planner did not answer in time")
    if isinstance(answer, str):
        return keep(state, active, question.slow, f"there is no plan without it: {answer}")
    if not answer.is_worth_it:
        return keep(state, active, question.slow, answer.why, answer.ask_again_s)
    return None


def told_slow(state: State) -> dict[NodeId, str]:
    """Return what to show of each straggler, left out or still in use."""
    told = {id_: node.slow for id_, node in state.nodes.items() if node.slow}
    active = state.active
    if active is None:
        return told
    for id_, slow in active.slowness.speeds.found(state.now, limits_of(state.options)).items():
        kept = active.slowness.kept.get(id_)
        told.setdefault(id_, str(slow) if kept is None else f"{slow}; it stays: {kept.why}")
    return told


def _name(state: State, id_: NodeId) -> str:
    node = state.nodes.get(id_)
    return id_ if node is None else node.record.name
