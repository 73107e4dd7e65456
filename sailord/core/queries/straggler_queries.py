"""Questions about stragglers: their measurements, which to leave out, and what to show."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import GenerationRecord, NodeId
from sailord.core.model.phases import Held, Running, Waiting
from sailord.core.model.state import Active, Slowness, State
from sailord.core.model.stragglers import NodeSpeeds, StepSample, Straggler
from sailord.core.queries.straggler_detection import look, worst

LOOK_S = 1.0
"""Seconds between two comparisons of speeds."""
SlowText = tuple[str, float | None]
"""How much slower than its peers or its past something is, and since when, if that is known."""
NOT_SLOW: SlowText = "", None
GROWN = 1.2
"""A node that computes no longer than this has not slowed down worth naming."""


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
    before = NodeSpeeds(number, active.progress.step) if is_new else active.slowness.speeds
    watch = look(
        before,
        _samples(state, active.generation),
        now=state.now,
        relative_error=busy.relative_error,
        options=state.options,
        stepped=(active.progress.advanced_at, active.progress.step),
    )
    kept = {id_: each for id_, each in active.slowness.kept.items() if state.now < each.until}
    return replace(state, active=replace(active, slowness=Slowness(watch, kept)))


def _samples(state: State, generation: GenerationRecord) -> dict[NodeId, StepSample]:
    """Return the measurements of the members that train."""
    assert generation.busy is not None
    predicted, found = generation.busy.seconds, {}
    for id_, report in state.reports_of(generation):
        ranks = ((s, predicted[rank]) for rank, s in report.busy if rank < len(predicted))
        slowest = worst(ranks) if report.taking == "running" else None
        if slowest is not None:
            gpu = state.nodes[id_].record.gpu
            found[id_] = StepSample(gpu, report.step, slowest[1], slowest[0])
    return found


def measured_ratios(state: State, active: Active) -> tuple[tuple[int, float], ...]:
    """Return measured over predicted compute time by rank, after the first ``slow_steps``."""
    generation, speeds = active.generation, active.slowness.speeds
    if generation is None or generation.busy is None or not speeds.factors:
        return ()
    if speeds.generation != generation.number:
        return ()
    predicted = generation.busy.seconds
    return tuple(
        sorted(
            (rank, seconds / predicted[rank])
            for _, report in state.reports_of(generation)
            for rank, seconds in report.busy
            if rank < len(predicted) and min(seconds, predicted[rank]) > 0
        )
    )


def prediction_drifts(active: Active) -> tuple[str, ...]:
    """Return by how much kinds of GPU differ from the prediction, beyond its error bar."""
    generation, speeds = active.generation, active.slowness.speeds
    if generation is None or generation.busy is None or speeds.generation != generation.number:
        return ()
    error = generation.busy.relative_error
    return tuple(
        f"{gpu} computes {factor:.2f} times as long as predicted (error bar {error:.0%})"
        for gpu, factor in sorted(speeds.factors.items())
        if abs(factor - 1) > error
    )


def to_leave_out(state: State, active: Active) -> dict[NodeId, Straggler]:
    """Return the stragglers to plan around, up to ``left_out_share`` of all nodes."""
    found = undecided_stragglers(state, active)
    return dict(list(found.items())[: room_for_stragglers(state)]) if found else {}


def undecided_stragglers(state: State, active: Active) -> dict[NodeId, Straggler]:
    """Return stragglers that were not yet decided about, slowest first."""
    if not active.slowness.speeds.slow or not isinstance(active.phase, Running):
        return {}
    if active.generation is None or active.slowness.speeds.generation != active.generation.number:
        return {}
    found = active.slowness.speeds.found(state.now, state.options)
    return {id_: slow for id_, slow in found.items() if id_ not in active.slowness.kept}


def room_for_stragglers(state: State) -> int:
    """Return how many more nodes may be left out."""
    living = [node for node in state.nodes.values() if not node.is_lost]
    most = int(state.options.left_out_share * len(living))
    return max(most - sum(bool(node.exclusion.slow) for node in living), 0)


def straggler_texts(state: State) -> dict[NodeId, SlowText]:
    """Return what to show of each straggler, left out or still in use."""
    told: dict[NodeId, SlowText] = {
        id_: (node.exclusion.slow, None) for id_, node in state.nodes.items() if node.exclusion.slow
    }
    active = state.active
    if active is None or not _is_measured(active):
        return told
    for id_, slow in active.slowness.speeds.told(state.now, state.options).items():
        kept = active.slowness.kept.get(id_)
        text = str(slow) if kept is None else f"{slow}; it stays: {kept.why}"
        told.setdefault(id_, (text, slow.since))
    return told


def _is_measured(active: Active) -> bool:
    """Return whether what was measured is of this generation, and it still trains or just did."""
    generation = active.generation
    if generation is None or active.slowness.speeds.generation != generation.number:
        return False
    return not isinstance(active.phase, Held | Waiting)


def slow_job(state: State, active: Active) -> tuple[float, str] | None:
    """Return since when the job is slower than before and how much, if no node is to blame."""
    speeds, generation = active.slowness.speeds, active.generation
    slow = speeds.job
    if slow is None or generation is None or speeds.generation != generation.number:
        return None
    if speeds.told(state.now, state.options) or not isinstance(active.phase, Running):
        return None
    if not slow.has_lasted(state.now, state.options):
        return None
    return slow.since, f"{slow}{_most_grown(state, generation, speeds)}"


def _most_grown(state: State, generation: GenerationRecord, speeds: NodeSpeeds) -> str:
    """Name the node that has slowed down most, if one has."""
    samples = _samples(state, generation)
    known = samples.keys() & speeds.past
    grown = {id_: samples[id_].factor / speeds.past[id_].best for id_ in known}
    most = max(sorted(grown), key=lambda id_: grown[id_], default=None)
    if most is None or grown[most] <= GROWN or min(grown.values()) > GROWN:
        return ""
    name = state.nodes[most].record.name
    return f"; {name} has slowed down most: {grown[most]:.1f} times as long"
