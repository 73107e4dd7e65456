"""The part of the controller's state that the capacity loop reads."""

from __future__ import annotations

from typing import Protocol

from sailord.core.model.state import State
from sailord.planning.messages import MoveContext


class ClusterView(Protocol):
    """A read-only view of the cluster."""

    @property
    def state(self) -> State:
        """The state after the last decision."""

    @property
    def move_context(self) -> MoveContext:
        """What the planner needs to judge a reconfiguration now."""

    @property
    def is_store_available(self) -> bool:
        """Whether the store answers."""
