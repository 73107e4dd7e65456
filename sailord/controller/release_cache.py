"""Caches up to which snapshot agents may delete, so that not every report recomputes it."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.records import GenerationRecord, Point
from sailord.core.model.state import State
from sailord.core.queries.restore_choice import release_now

AGE_S = 0.2
"""Maximum age of the cached point; more for large clusters, where it takes longer to compute."""
NODES_PER_S = 2000


@dataclass(eq=False)
class ReleaseCache:
    """The last release point, and its generation."""

    _generation: GenerationRecord | None = None
    _at: float = float("-inf")
    _point: Point | None = None

    def point(self, state: State, now: float) -> Point | None:
        """Older snapshots of the active job may be deleted; ``None``: none of them."""
        present = None if state.active is None else state.active.generation
        age_s = max(AGE_S, len(state.nodes) / NODES_PER_S)
        if present != self._generation or now >= self._at + age_s:
            self._generation, self._at, self._point = present, now, release_now(state)
        return self._point
