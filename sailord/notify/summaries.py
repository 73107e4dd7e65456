"""One line for a whole reconfiguration: its cause, result and cost."""

from __future__ import annotations

from sailord.core.queries.reconfiguration_timing import START, ReconfigurationTiming
from sailord.text.causes import short_cause
from sailord.text.units import counted


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
