"""One line for a whole reconfiguration: its cause, result and cost."""

from __future__ import annotations

from sailord.core.queries.reconfiguration_timing import START, ReconfigurationTiming
from sailord.text.units import counted

STATES = {
    "is lost": "lost",
    "is draining": "draining",
    "is slow": "slow",
    "failed": "failed",
    "could help": "added",
}
"""The words of a trigger about a node, and their short form."""
NAMES_MAX = 4


def summary_of(move: ReconfigurationTiming, members: int) -> str:
    """Return one line: ``a2 lost → moved to 5 nodes, 0 steps lost, 1.2 s downtime``.

    A start interrupts nothing: its seconds are how long it took in all.
    """
    nodes = counted(members, "node")
    if move.kind == START:
        return f"started on {nodes} from step {move.restored_step}, {move.total_s:.1f} s"
    where = "" if move.source == "memory" else f", from step {move.restored_step} ({move.source})"
    lost = counted(move.steps_lost, "step")
    cause = short_cause(move.reason)
    return f"{cause} → moved to {nodes}{where}, {lost} lost, {move.downtime_s:.1f} s downtime"


def short_cause(reason: str) -> str:
    """Return a trigger's reason without explanations, with nodes of the same state named together.

    ``a2 is lost: its lease expired; a3 is lost: the same`` becomes ``a2, a3 lost``.
    Of a failure the explanation stays.
    """
    names: dict[str, list[str]] = {}
    for part in reason.split("; "):
        said, _, why = part.partition(": ")
        state = next((state for state in STATES if said.endswith(f" {state}")), None)
        if state is None:
            names.setdefault(said, [])
        else:
            # A failure may be an error of the user's script.
            word = f"failed: {why}" if state == "failed" and why else STATES[state]
            names.setdefault(word, []).append(said.removesuffix(f" {state}"))
    return "; ".join(f"{_some(who)} {word}" if who else word for word, who in names.items())


def _some(names: list[str]) -> str:
    rest = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {rest} more" if rest > 0 else "")
