"""What the handlers share: configuration, controller, access to the store, rate limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agents.daemon.clock import Clock
from agents.protocol.records import Leader
from agents.rpc.signing import Verifier
from agents.store.interface import StoreUnavailable
from sailord.capacity.loop import CapacityLoop
from sailord.cluster_records import Gateway
from sailord.config import Config
from sailord.controller.loop import Controller
from sailord.core.model.state import State
from sailord.network.profiler import NetworkProfiler

BURST = 200.0
PER_S = 50.0
"""Webhook messages accepted from one address."""
SENDERS_MAX = 10_000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class RateLimit:
    """A token bucket for one sender."""

    left: float = BURST
    at: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Take one token; ``False`` if the bucket is empty."""
        now = time.monotonic()
        self.left = min(BURST, self.left + (now - self.at) * PER_S)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass(eq=False)
class ApiContext:
    """Shared by all handlers."""

    config: Config
    controller: Controller
    own_gateway: Gateway
    clock: Clock
    key: bytes
    network: NetworkProfiler
    store_changed: asyncio.Event
    """Set to have the store read at once."""
    capacity: CapacityLoop | None = None
    """Only if a provider is configured."""
    leader: Leader | None = None
    """The present leader, as last read; ``None``: none is elected."""
    plans_seen: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = field(
        default_factory=dict
    )
    """The plan shown last, and what the planner said of it."""
    verifier: Verifier = field(init=False)
    rate_limits: dict[str, RateLimit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.verifier = Verifier(self.key)

    @property
    def state(self) -> State:
        """The state now; empty unless we are the leader."""
        return self.controller.cluster.state

    @property
    def last_led(self) -> State:
        """The last state in which we were the leader: what requests are answered from."""
        return self.controller.cluster.last_led

    @property
    def gateway(self) -> Gateway:
        """Access to the store; raises ``StoreUnavailable`` at once while it is known to be down."""
        store = self.controller.cluster.store
        if not store.is_available:
            raise StoreUnavailable(store.error or "it does not answer")
        return self.own_gateway

    def allows(self, sender: str) -> bool:
        """Whether the sender is within its rate limit."""
        if sender not in self.rate_limits and len(self.rate_limits) >= SENDERS_MAX:
            self.rate_limits.clear()
        return self.rate_limits.setdefault(sender, RateLimit()).take()


CONTEXT = web.AppKey("context", ApiContext)
