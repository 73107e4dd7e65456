"""Caches up to which snapshot agents may delete, so that not every report recomputes it."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import GenerationRecord, Point
from sailord.core.model.state import State
from sailord.core.queries.restore_choice import release_now, safe_point

AGE_S = 0.2
"""Maximum age of the cached point; more for large clusters, where it takes longer to compute."""
NODES_PER_S = 2000


@dataclass(eq=False)
class ReleaseCache:
    """The points that were computed last (released, safe), and for which generation."""

    _generation: GenerationRecord | None = None
    _at: float = float("-inf")
    _released: Point | None = None
    _safe: Point | None = None

    def released(self, state: State, now: float) -> Point | None:
        """Return the point before which snapshots of the active job may go; ``None``: keep all."""
        self._refresh(state, now)
        return self._released

    def safe(self, state: State, now: float) -> Point | None:
        """The newest point that survives the loss of any one node, or of a zone where asked."""
        self._refresh(state, now)
        return self._safe

    def _refresh(self, state: State, now: float) -> None:
        """Compute both points from the same state: a node that joins changes both."""
        present = None if state.active is None else state.active.generation
        age_s = max(AGE_S, len(state.nodes) / NODES_PER_S)
        if present != self._generation or now >= self._at + age_s:
            self._generation, self._at, self._released = present, now, release_now(state)
            self._safe = safe_point(state, self._released)
