"""What the job would lose with each node, with names and as a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
    for id_, loss in node_losses(state).items():
        names = tuple(state.nodes[other].record.name for other in loss.kept_on)
        step_s = None if state.active is None else state.active.progress.step_s
        seconds = None if loss.steps is None or step_s is None else loss.steps * step_s
        text = _sentence(loss, names, seconds)
        then = None if loss.source is None or is_held else following(id_)
        next_s = why_none = None
        if isinstance(then, NoPlan) and _is_outdated(state, id_):
            then = None
        if isinstance(then, NoPlan):
            why_none = "; ".join([then.why, *_kept_out(state, id_)])
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


def _is_outdated(state: State, lost: NodeId) -> bool:
    """Return whether plans may use another node only since the job runs: none was computed."""
    active = state.active
    if active is None or not isinstance(active.phase, Running):
        return False
    others = (node for id_, node in state.nodes.items() if id_ != lost)
    since = active.phase.since
    return any(node.is_usable(is_member=False) and node.free_since > since for node in others)


def _kept_out(state: State, lost: NodeId) -> list[str]:
    """Return which other nodes are up that an order keeps out of plans, and what lets them in."""
    said = {}
    for id_, node in state.nodes.items():
        name = node.record.name
        if id_ == lost or node.absent_since is not None:
            continue
        if node.is_draining:
            said["draining"] = f"{name} is draining: sailorctl withdraw {name} cancels that"
        elif node.exclusion.is_cordoned:
            said["cordoned"] = f"{name} is cordoned: sailorctl uncordon {name} lets plans use it"
    return [said[state] for state in sorted(said)]


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
            return f"{lost}, state is kept on {_joined(names, loss.keepers) or 'other nodes'}"
        case "durable" if loss.is_only_keeper:
            return f"{lost}: after the checkpoint of step {loss.step}, only it keeps its state"
        case "durable":
            return f"{lost}: the checkpoint of step {loss.step} is newer than what nodes keep"
        case "start" if loss.is_only_keeper:
            return f"{lost}: only it keeps its state, and there is no checkpoint"
        case "start":
            return f"{lost}: no node keeps the job's state yet, and there is no checkpoint"


def _joined(names: Sequence[str], count: int) -> str:
    rest = count - NAMES_MAX
    shown = [*names[:NAMES_MAX], *([f"{rest} more"] if rest > 0 else [])]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
