"""What the handlers share: configuration, cluster, access to the store, rate limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from prometheus_client import Histogram

from agents.daemon.clock import Clock
from agents.protocol.records import JobId
from agents.rpc.signing import ClusterKey, Verifier
from agents.rpc.strangers import Budgets, StrangerLimits
from agents.rpc.tls import Tls
from agents.store.interface import StoreUnavailable
from sailord.api.access.key_set import KeySet
from sailord.api.answers.problems import FirstSeen
from sailord.api.handlers.controller_view import ControllerView
from sailord.capacity.loop import CapacityLoop
from sailord.cluster_records import Gateway
from sailord.config import Config
from sailord.goodput.bookkeeper import Bookkeeper
from sailord.network.profiler import NetworkProfiler
from sailord.page.training_curve import TrainingCurves
from sailord.providers.gce.config import GceConfig
from sailord.tokens import AccessTokenFile

BURST = 200.0
PER_S = 50.0
"""Webhook messages of one form that are accepted at once, and then each second."""

PACKAGE_KEPT_S = 3600.0
"""A package is kept this long after it was last uploaded or asked for, though no job has it."""

REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


@dataclass(eq=False)
class ApiContext:
    """Shared by all handlers."""

    config: Config
    cluster: ControllerView
    own_gateway: Gateway
    clock: Clock
    key: ClusterKey
    network: NetworkProfiler
    goodput: Bookkeeper
    capacity: CapacityLoop | None = None
    """Only if a provider is configured."""
    tls: Tls | None = None
    """``None``: plain HTTP."""
    plans_seen: dict[tuple[JobId, str], tuple[dict[str, Any] | None, dict[str, Any]]] = field(
        default_factory=dict
    )
    """The plans shown last, and what the planner said of them, by job and hash: jobs of different
    models may have the same plan."""
    timelines_seen: dict[tuple[JobId, str], dict[str, Any]] = field(default_factory=dict)
    """The schedules shown last, likewise."""
    curves: TrainingCurves = field(default_factory=TrainingCurves)
    """Loss and throughput of jobs."""
    first_seen: FirstSeen = field(default_factory=FirstSeen)
    """When each problem was first seen."""
    packages_used_s: dict[str, float] = field(default_factory=dict)
    """When each package was last uploaded or asked for; those of the last hours."""
    verifier: Verifier = field(init=False)
    tokens: AccessTokenFile = field(init=False)
    instance_keys: KeySet | None = field(init=False)
    """Verify what rented instances prove before they enrol; ``None``: none enrol here."""
    pubsub_keys: KeySet | None = field(init=False)
    """``None``: pushes of Pub/Sub are not accepted."""
    strangers: StrangerLimits = field(default_factory=StrangerLimits)
    request_times: Histogram = field(
        default_factory=lambda: Histogram(
            "sailor_http_request_seconds", "Duration of requests, by address and status.",
            ("route", "status"), buckets=REQUEST_BUCKETS, registry=None,
        )
    )  # fmt: skip
    webhook_budgets: Budgets = field(default_factory=lambda: Budgets(PER_S, BURST))
    """For each form of webhooks."""

    def __post_init__(self) -> None:
        self.verifier = Verifier(self.key, lambda: self.config.address, time.monotonic())
        keys = self.config.webhooks.pubsub_keys
        self.pubsub_keys = None if keys is None else KeySet(keys)
        provider, tls = self.config.provider, self.config.tls
        self.instance_keys = None
        if isinstance(provider, GceConfig) and tls is not None and tls.authority is not None:
            self.instance_keys = KeySet(provider.identity_keys)
        self.tokens = AccessTokenFile(self.config.tokens, self.config.token)

    def use_package(self, name: str) -> None:
        """Note that a package is uploaded, or about to be submitted with a job."""
        self.packages_used_s[name] = time.monotonic()

    def lately_used_packages(self) -> frozenset[str]:
        """Return the packages that may belong to a submission under way."""
        since_s = time.monotonic() - PACKAGE_KEPT_S
        self.packages_used_s = {n: at for n, at in self.packages_used_s.items() if at >= since_s}
        return frozenset(self.packages_used_s)

    def may_stream_on(self, term: int | None) -> bool:
        """Return False once the term of a stream has changed, or another sailord leads."""
        leader = self.cluster.leader
        is_elsewhere = leader is not None and leader.address != self.config.address
        return self.cluster.state.term == term and not (term is None and is_elsewhere)

    @property
    def gateway(self) -> Gateway:
        """Access to the store; raises ``StoreUnavailable`` at once while it is known to be down."""
        store = self.cluster.store
        if not store.is_available:
            raise StoreUnavailable(store.error or "it does not answer")
        return self.own_gateway


CONTEXT = web.AppKey("context", ApiContext)
