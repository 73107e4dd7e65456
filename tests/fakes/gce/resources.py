"""The resources of the fake cloud and its injectable failures: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Offer:
    """A machine type: its GPUs, by which quotas they count, and what it costs."""

    accelerator: str
    gpus: int
    metric: str
    usd_per_hour: float
    spot_usd_per_hour: float


@dataclass(eq=False)
class ApiError(Exception):
    """An error answer in place of the usual one."""

    status: int
    reason: str
    message: str


@dataclass(eq=False)
class InjectedFailure:
    """An injected failure of some of the next requests."""

    path: str
    """A pattern for ``METHOD path``."""
    times: int
    status: int = 0
    """The answer; 0: the usual one."""
    reason: str = "backendError"
    message: str = "Internal error. Please try again or contact Google Support."
    delay_s: float = 0.0
    is_done: bool = False
    """The request takes effect, and only its answer is lost."""
    retry_after_s: int | None = None


@dataclass(eq=False)
class Vm:
    """A machine, from its creation on; kept for the bill after its deletion."""

    id: int
    name: str
    zone: str
    machine: str
    spot: bool
    gpus: int
    metric: str
    usd_per_hour: float
    created_at: float
    body: dict[str, Any]
    status: str = "PROVISIONING"
    boots: bool = True
    has_gpu: bool = True
    off_at: float | None = None
    """Time of its preemption, after which it costs nothing."""
    ended_at: float | None = None
    """Whether it is deleted, with its disk."""

    @property
    def is_there(self) -> bool:
        return self.ended_at is None

    def usd(self, now: float) -> float:
        """Return its cost from its creation until it was preempted or deleted."""
        end = min(at for at in (self.off_at, self.ended_at, now) if at is not None)
        return self.usd_per_hour * (end - self.created_at) / 3600

    @property
    def metadata(self) -> dict[str, str]:
        """What its owner wrote for its own eyes, the start-up script among it."""
        return {item["key"]: item["value"] for item in self.body["metadata"].get("items", ())}


@dataclass(eq=False)
class Operation:
    """An operation: a request's, or one of the cloud's own."""

    id: int
    type: str
    zone: str
    inserted_at: float
    client_id: str = ""
    target_id: int = 0
    target_name: str = ""
    ended_at: float | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    http_status: int = 0
    group: str = ""

    @property
    def name(self) -> str:
        return f"operation-{self.id}"


RANGES = {"us-central1": "10.128.0.0/20", "us-east1": "10.142.0.0/20"}
"""Of the automatic subnets; other regions share one."""


def internal_rule() -> dict[str, Any]:
    """Return the rule of a default network that lets its instances reach each other."""
    ports = ["0-65535"]
    return {
        "name": "default-allow-internal",
        "direction": "INGRESS",
        "priority": 65534,
        "sourceRanges": ["10.128.0.0/9"],
        "allowed": [{"IPProtocol": "tcp", "ports": ports}, {"IPProtocol": "icmp"}],
    }


@dataclass(eq=False)
class Network:
    """A network with its firewall rules; by default Google's default network."""

    is_automatic: bool = True
    subnets: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """By region and name, those beside the automatic ones."""
    rules: list[dict[str, Any]] = field(default_factory=lambda: [internal_rule()])
    policies: list[dict[str, Any]] = field(default_factory=list)
    regional: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By region, the policies of that region alone."""
    order: str = "AFTER_CLASSIC_FIREWALL"
    """Whether its own policies come after its rules."""
    routers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By region, their address translations."""
    lacks: set[str] = field(default_factory=set)
    """Regions without an automatic subnet."""

    def subnet(self, region: str, name: str, *, own: str) -> dict[str, Any] | None:
        """Return the subnet of a name, if there is one."""
        if self.is_automatic and name == own and region not in self.lacks:
            return {"ipCidrRange": RANGES.get(region, "10.164.0.0/20")}
        return self.subnets.get((region, name))


@dataclass(eq=False)
class Group:
    """A managed group of machines: its template and the machines that it should have."""

    name: str
    zone: str
    properties: dict[str, Any]
    wanted: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, the metadata that one has beyond the template's."""
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, why the last attempt to make one failed."""
    queue: dict[str, ResizeRequest] = field(default_factory=dict)
    """Resize requests, those that have ended among them."""


@dataclass(eq=False)
class ResizeRequest:
    """A request that waits until all of its machines can be made at once."""

    name: str
    description: str
    configs: list[dict[str, Any]]
    run_s: float
    created_at: float
    state: str = "ACCEPTED"
    errors: list[dict[str, Any]] = field(default_factory=list)


class Hooks:
    """Callbacks for machines, without effect by default; a test may run real agents in them."""

    def booted(self, vm: Vm) -> None:
        """The machine runs now, with or without its GPU."""

    def warned(self, vm: Vm, seconds: float) -> None:
        """Its metadata server says that it is preempted from now on."""

    def ended(self, vm: Vm) -> None:
        """The machine's power is off."""
