"""What agents may forget of the active job, worked out now and then instead of at each report."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import GenerationRecord, Point
from sailord.core.restore_choice import release_now
from sailord.core.state import State

AGE_S = 0.2
"""How old it may be; that of a large cluster takes longer to work out, and is heard less often."""
NODES_PER_S = 2000


@dataclass(eq=False)
class Releasing:
    """The last answer, and which generation it is about."""

    _of: GenerationRecord | None = None
    _at: float = float("-inf")
    _point: Point | None = None

    def point(self, state: State, now: float) -> Point | None:
        """Snapshots of the active job before this one may be forgotten; ``None``: none of them."""
        present = None if state.active is None else state.active.generation
        age_s = max(AGE_S, len(state.nodes) / NODES_PER_S)
        if present != self._of or now >= self._at + age_s:
            self._of, self._at, self._point = present, now, release_now(state)
        return self._point
