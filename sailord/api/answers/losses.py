"""What the job would lose with each node, with names and as a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from agents.protocol.records import NodeId
from sailord.api.answers.types import LossView
from sailord.core.model.state import State
from sailord.core.queries.node_loss import NodeLoss, node_losses
from sailord.planning.precomputed import NextPlan, NoPlan
from sailord.text.units import counted, duration

NAMES_MAX = 4


def losses_view(
    state: State, following: Callable[[NodeId], NextPlan | NoPlan | None] = lambda _: None
) -> dict[NodeId, LossView]:
    """Return by node what the active job would lose if it died now, and what would follow."""
    found = {}
    for id_, loss in node_losses(state).items():
        names = tuple(state.nodes[other].record.name for other in loss.kept_on)
        step_s = None if state.active is None else state.active.progress.step_s
        seconds = None if loss.steps is None or step_s is None else loss.steps * step_s
        text = _sentence(loss, names, seconds)
        then = None if loss.source is None else following(id_)
        if isinstance(then, NoPlan):
            text += f"; then the job waits, for the nodes left have no plan: {then.why}"
        elif then is not None:
            now_s = "" if step_s is None else f" (now {duration(step_s)})"
            on = f"{counted(then.nodes, 'node')} with {counted(then.gpus, 'GPU')}"
            text += f"; then {on}, {duration(then.step_s)} a step{now_s}"
        found[id_] = LossView(
            *(loss.steps, loss.step, seconds, loss.source, names, loss.keepers, text),
            next_nodes=then.nodes if isinstance(then, NextPlan) else None,
            next_gpus=then.gpus if isinstance(then, NextPlan) else None,
            next_step_s=then.step_s if isinstance(then, NextPlan) else None,
            why_no_plan=then.why if isinstance(then, NoPlan) else None,
        )
    return found


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
        case "durable":
            return f"{lost}: after the checkpoint of step {loss.step}, only it keeps its state"
        case "start":
            return f"{lost}: only it keeps its state, and there is no checkpoint"


def _joined(names: Sequence[str], count: int) -> str:
    rest = count - NAMES_MAX
    shown = [*names[:NAMES_MAX], *([f"{rest} more"] if rest > 0 else [])]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
