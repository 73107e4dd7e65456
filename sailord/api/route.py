"""The type of a row in the table of routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agents.rpc.server import Handler
from sailord.tokens import Role

Auth = Literal["token", "signature", "none"]
"""``token``: over TCP clients send the bearer token, over the Unix socket none is needed.
``signature``: the handler checks a signature or a token of its own."""
ServedBy = Literal["leader", "leader_if_elected", "any"]
"""``leader``: another sailord passes the request on. ``leader_if_elected``: likewise, but it
answers itself while no leader is elected. ``any``: every sailord answers itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One address of the API."""

    method: str
    path: str
    name: str
    handler: Handler
    answers: tuple[type | str, ...]
    """Types of the answer, as JSON; or a media type of text."""
    auth: Auth = "token"
    role: Role = "viewer"
    """What a caller must be at least."""
    served_by: ServedBy = "leader"
    body: str | None = None
    """Name of the body's schema."""
    success: int = 200
    refuses: tuple[int, ...] = ()
    """Statuses of refusals, beside those that follow from the rest."""
    others: Mapping[int, type] = field(default_factory=dict)
    """Statuses other than ``success`` that may come with a type of their own."""
