"""What the job would lose with each node, with names and as a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agents.protocol.records import NodeId
from sailord.api.answers.node_types import LossView
from sailord.core.model.phases import Held, Running
from sailord.core.model.state import State
from sailord.core.queries.node_loss import NodeLoss, node_losses
from sailord.core.queries.timeouts import scaled_step_s
from sailord.planning.precomputed import NextPlan, NoPlan
from sailord.text.units import counted, duration

NAMES_MAX = 4


def losses_view(
    state: State, following: Callable[[NodeId], NextPlan | NoPlan | None] = lambda _: None
) -> dict[NodeId, LossView]:
    """Return by node what the active job would lose if it died now, and what would follow."""
    found = {}
    is_held = state.active is not None and isinstance(state.active.phase, Held)  # None follows.
    others = _Others.of(state)
    for id_, loss in node_losses(state).items():
        names = tuple(state.nodes[other].record.name for other in loss.kept_on)
        step_s = None if state.active is None else state.active.progress.step_s
        seconds = None if loss.steps is None or step_s is None else loss.steps * step_s
        text = _sentence(loss, names, seconds)
        then = None if loss.source is None or is_held else following(id_)
        next_s = why_none = None
        if isinstance(then, NoPlan) and others.is_outdated(id_):
            then = None
        if isinstance(then, NoPlan):
            why_none = "; ".join([then.why, *others.without(id_)])
            text += f"; then the job waits, for the nodes left have no plan: {why_none}"
        elif then is not None:
            next_s, speed = _next_speed(state, then)
            on = f"{counted(then.nodes, 'node')} with {counted(then.gpus, 'GPU')}"
            text += f"; then {on}, {speed}"
        found[id_] = LossView(
            *(loss.steps, loss.step, seconds, loss.source, names, loss.keepers, text),
            next_nodes=then.nodes if isinstance(then, NextPlan) else None,
            next_gpus=then.gpus if isinstance(then, NextPlan) else None,
            next_step_s=next_s,
            why_no_plan=why_none,
        )
    return found


def needed_nodes(
    state: State, following: Callable[[NodeId], NextPlan | NoPlan | None]
) -> tuple[str, ...]:
    """Return the names of the job's nodes without any one of which there is no plan."""
    active = state.active
    if active is None or active.generation is None or not isinstance(active.phase, Running):
        return ()
    without = [id_ for id_ in active.generation.members if isinstance(following(id_), NoPlan)]
    others = _Others.of(state) if without else None
    nodes = (state.nodes[id_] for id_ in without if others and not others.is_outdated(id_))
    return tuple(sorted(node.record.name for node in nodes if not node.is_lost))


@dataclass(frozen=True, slots=True)
class _Others:
    """Nodes that plans may use since the job runs, and those that orders keep out of plans.

    At most two of each kind, since the one whose loss is looked at does not count.
    """

    free: tuple[NodeId, ...]
    """They became usable after the job began to run: no plan with them was computed."""
    kept_out: Mapping[str, tuple[tuple[NodeId, str], ...]]
    """By kind of order: nodes, and what lets plans use them."""

    @classmethod
    def of(cls, state: State) -> _Others:
        """Look at all nodes once."""
        active = state.active
        since = math.inf
        if active is not None and isinstance(active.phase, Running):
            since = active.phase.since
        free: list[NodeId] = []
        kept_out: dict[str, list[tuple[NodeId, str]]] = {}
        for id_, node in state.nodes.items():
            name = node.record.name
            if len(free) < 2 and node.free_since > since and node.is_usable(is_member=False):
                free.append(id_)
            if node.absent_since is not None:
                continue
            is_drained = any(each.kind in ("drain", "preempt") for each in state.marks.get(id_, ()))
            if node.is_draining and is_drained and node.exclusion.yields_since is None:
                cure = f"{name} was drained: sailorctl withdraw {name} cancels that"
                kept_out.setdefault("drained", []).append((id_, cure))
            elif node.exclusion.is_cordoned:
                cure = f"{name} is cordoned: sailorctl uncordon {name} lets plans use it"
                kept_out.setdefault("cordoned", []).append((id_, cure))
        return cls(tuple(free), {k: tuple(v[:2]) for k, v in sorted(kept_out.items())})

    def is_outdated(self, lost: NodeId) -> bool:
        """Return whether plans may use another node only since the job runs."""
        return any(id_ != lost for id_ in self.free)

    def without(self, lost: NodeId) -> list[str]:
        """Return for each kind of order one other node, and what lets plans use it."""
        found = (
            next((cure for id_, cure in each if id_ != lost), "") for each in self.kept_out.values()
        )
        return [cure for cure in found if cure]


def _next_speed(state: State, then: NextPlan) -> tuple[float, str]:
    """Return the seconds of a step under the next plan, comparable with those measured now.

    A prediction alone may be wrong by a multiple, and so would say nothing beside a measured step.
    """
    active = state.active
    scaled_s = None if active is None else scaled_step_s(active, then.step_s)
    if active is None or active.progress.step_s is None or scaled_s is None:
        return then.step_s, f"predicted {duration(then.step_s)} a step"
    now_s = duration(active.progress.step_s)
    return scaled_s, f"about {duration(scaled_s)} a step (now {now_s})"


def losses_of_parts(
    parts: Iterable[State], following: Callable[[NodeId], NextPlan | NoPlan | None]
) -> dict[NodeId, LossView]:
    """The same where several jobs share the cluster: what the job that has the node would lose."""
    return {id_: view for part in parts for id_, view in losses_view(part, following).items()}


def _sentence(loss: NodeLoss, names: Sequence[str], seconds: float | None) -> str:
    if loss.steps is None:
        return "not known yet: nodes have still to report what they keep"
    if loss.source is None:
        return "0 steps lost: the job does not train on it"
    count = f"{loss.steps:,} step{'' if loss.steps == 1 else 's'} lost"
    lost = f"at most {count}" if loss.steps else count
    if seconds:
        lost += f" ({duration(seconds)} to train again)"
    match loss.source:
        case "memory":
            return f"{lost}, state is kept on {_join_names(names, loss.keepers) or 'other nodes'}"
        case "durable" if loss.is_only_keeper:
            return f"{lost}: after the checkpoint of step {loss.step}, only it keeps its state"
        case "durable":
            return f"{lost}: the checkpoint of step {loss.step} is newer than what nodes keep"
        case "start" if loss.is_only_keeper:
            return f"{lost}: only it keeps its state, and there is no checkpoint"
        case "start":
            return f"{lost}: no node keeps the job's state yet, and there is no checkpoint"


def _join_names(names: Sequence[str], count: int) -> str:
    rest = count - NAMES_MAX
    shown = [*names[:NAMES_MAX], *([f"{rest} more"] if rest > 0 else [])]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
