"""A cloud in memory: machines, operations, quotas, groups, injected failures, and a bill.

It has no HTTP; ``rest`` does. A test sets its behaviour, also while it runs, and may attach real
agents to its machines through ``Hooks``. All calls hold one lock.
"""

from __future__ import annotations

import heapq
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.gce.resources import (
    ApiError,
    Group,
    Hooks,
    InjectedFailure,
    Network,
    Offer,
    Operation,
    Vm,
)

STOCKOUT = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
ZONES = {
    "us-central1-a": "us-central1",
    "us-central1-b": "us-central1",
    "us-east1-b": "us-east1",
    "europe-west4-a": "europe-west4",
}


OFFERS = {
    "a2-highgpu-1g": Offer("nvidia-tesla-a100", 1, "NVIDIA_A100_GPUS", 3.67, 1.57),
    "a2-highgpu-2g": Offer("nvidia-tesla-a100", 2, "NVIDIA_A100_GPUS", 7.35, 3.14),
    "a3-highgpu-8g": Offer("nvidia-h100-80gb", 8, "NVIDIA_H100_GPUS", 88.25, 26.48),
    "g2-standard-4": Offer("nvidia-l4", 1, "NVIDIA_L4_GPUS", 0.71, 0.28),
    "n1-standard-8": Offer("", 0, "", 0.38, 0.08),
}
ROLE = Path(__file__).parents[3] / "sailord/providers/gce/role.yaml"
IMAGE = "deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
ACCOUNT = "sailor-machine@test-project.iam.gserviceaccount.com"
ATTACHABLE = ("nvidia-tesla-t4", "nvidia-tesla-v100")
"""GPUs that machine types without any may get."""


def role_permissions() -> frozenset[str]:
    """Return the permissions of the role that docs/gce.md has an operator create."""
    return frozenset(re.findall(r"^- ([\w.]+)", ROLE.read_text(), re.MULTILINE))


@dataclass(eq=False)
class Cloud:
    """The state of everything, and how it behaves."""

    project: str = "test-project"
    hooks: Hooks = field(default_factory=Hooks)
    clock: Callable[[], float] = time.time
    zones: Mapping[str, str] = field(default_factory=lambda: dict(ZONES))
    offers: Mapping[str, Offer] = field(default_factory=lambda: dict(OFFERS))
    not_offered: set[tuple[str, str]] = field(default_factory=set)
    """Zones that lack a machine type or a kind of attachable GPU."""
    stock: dict[tuple[str, str, bool], int] = field(default_factory=dict)
    """Supply by zone, machine type and spot; unlimited if absent."""
    quotas: dict[tuple[str, str], float] = field(default_factory=dict)
    """By region (or ``global``) and metric; what is absent has no limit and is not listed."""
    families: dict[tuple[str, str], int] = field(default_factory=dict)
    """The same for those that only the Cloud Quotas API tells; they are limits, too."""
    has_quotas_api: bool = True
    failures: list[InjectedFailure] = field(default_factory=list)
    denied: set[str] = field(default_factory=set)
    """Permissions that the caller lacks."""
    granted: frozenset[str] = field(default_factory=role_permissions)
    """Permissions that the caller has: those of the documented role."""
    needed: set[str] = field(default_factory=set)
    """Permissions that the calls so far needed."""
    networks: dict[str, Network] = field(default_factory=lambda: {"default": Network()})
    images: dict[str, dict[str, Any]] = field(default_factory=lambda: {IMAGE: {"diskSizeGb": "50"}})
    accounts: set[str] = field(default_factory=lambda: {ACCOUNT})
    """Service accounts that the caller may use."""
    placements: set[str] = field(default_factory=lambda: {"near"})
    """Placement policies of every region."""
    reservations: dict[str, str] = field(default_factory=dict)
    """Their machine types, by name; those of every zone."""
    is_expired: bool = False
    """Credentials are not accepted any more."""
    unreachable: set[str] = field(default_factory=set)
    """Zones that aggregated lists cannot see."""
    warns: bool = True
    """A list also warns in an unreachable zone's own part of it."""
    hides_causes: bool = False
    """A bulk insert that makes nothing has no cause; the operations of its instances have it."""
    operation_s: float = 0.05
    boot_s: float = 0.05
    page: int = 500
    hung: int = 0
    """Number of next operations that never end."""
    dead: int = 0
    """Number of next machines that never boot."""
    blind: int = 0
    """Number of next machines that boot without their GPU."""
    groups: dict[str, Group] = field(default_factory=dict)
    vms: list[Vm] = field(default_factory=list)
    operations: dict[str, Operation] = field(default_factory=dict)
    remembers_s: float = 3600.0
    """Time for which a repeated request is recognised by its id: Google promises one hour."""
    ordered: dict[str, int] = field(default_factory=dict)
    """By request id, how many machines were asked for, ..."""
    made: Counter[str] = field(default_factory=Counter)
    """... and how many were made for it in all its life, those that are gone among them."""
    asked: list[str] = field(default_factory=list)
    """Every request, as ``METHOD path``."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(4_000_000_000_000_000_001))
    _seen: dict[str, Operation] = field(default_factory=dict)

    # ---- time -----------------------------------------------------------------------------------

    def now(self) -> float:
        """The time, in whole milliseconds as its answers tell it."""
        return round(self.clock(), 3)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._due, (self.now() + seconds, next(self._numbers), act))

    def advance(self) -> None:
        """Run what is due."""
        with self.lock:
            while self._due and self._due[0][0] <= self.now():
                heapq.heappop(self._due)[2]()

    # ---- what there is --------------------------------------------------------------------------

    def there(self, zone: str | None = None) -> list[Vm]:
        """Machines that exist, running or not."""
        return [vm for vm in self.vms if vm.is_there and zone in (None, vm.zone)]

    def named(self, zone: str, name: str) -> Vm:
        """The machine with a name or a number."""
        for vm in self.there(zone):
            if name in (vm.name, str(vm.id)):
                return vm
        what = f"projects/{self.project}/zones/{zone}/instances/{name}"
        raise ApiError(404, "notFound", f"The resource '{what}' was not found")

    def used(self, region: str, metric: str) -> float:
        """How much of a quota is taken."""
        total = 0
        for vm in self.there():
            if region in ("global", self.zones[vm.zone]) and vm.gpus:
                own = metric == self._metric(vm.metric, spot=vm.spot, zone=vm.zone)
                every = metric == "GPUS_ALL_REGIONS" and not vm.spot
                total += vm.gpus if own or every else 0
        return float(total)

    def bill(self) -> float:
        """Dollars: every machine by the second, while it is on."""
        with self.lock:
            return sum(vm.usd(self.now()) for vm in self.vms)

    def disks(self) -> list[str]:
        """The disks that are there, by their machines' names: one may outlive its machine."""
        return [
            vm.name
            for vm in self.vms
            for disk in vm.body["disks"]
            if vm.is_there or not disk.get("autoDelete")
        ]

    def running_operations(self) -> list[Operation]:
        """Operations that have not ended."""
        return [one for one in self.operations.values() if one.ended_at is None]

    # ---- machines -------------------------------------------------------------------------------

    def insert(self, zone: str, body: Mapping[str, Any], client_id: str = "") -> Operation:
        """Make one machine."""
        self._need_to_create(body)
        known = self._known(client_id)
        if known is not None:
            return known
        name, machine = body["name"], body["machineType"].rpartition("/")[2]
        self._offered(zone, machine, body)
        self._free(zone, name)
        refusal = self._refusal(zone, machine, _is_spot(body), 1)
        if refusal is None:
            self._count(client_id, 1, 1)
            vm = self._make(zone, name, machine, body)
            return self.operation("insert", zone, client_id=client_id, vm=vm)
        return self.operation("insert", zone, client_id=client_id, error=refusal)

    def bulk_insert(self, zone: str, body: Mapping[str, Any], client_id: str = "") -> Operation:
        """Make some machines, or none if fewer than the minimum are available."""
        self._need_to_create(body["instanceProperties"])
        known = self._known(client_id)
        if known is not None:
            return known
        properties = body["instanceProperties"]
        machine, spot = properties["machineType"], _is_spot(properties)
        if "/" in machine:
            raise ApiError(400, "invalid", f"Invalid value '{machine}': give a name, not a path")
        self._offered(zone, machine, properties)
        count, least = int(body["count"]), int(body.get("minCount", body["count"]))
        names = list(body.get("perInstanceProperties") or ())
        if names and len(names) != count:
            raise ApiError(400, "invalid", "perInstanceProperties must name count instances")
        if not names:
            hashes = re.search("#+", body["namePattern"])
            assert hashes is not None
            width = len(hashes[0])
            names = [body["namePattern"].replace(hashes[0], f"{i:0{width}d}") for i in range(count)]
        for name in names:
            self._free(zone, name)
        made = 0
        while made < count and self._refusal(zone, machine, spot, made + 1) is None:
            made += 1
        refusal = None if made == count else self._refusal(zone, machine, spot, count)
        if made < least:
            parent = self.operation("bulkInsert", zone, client_id=client_id, error=refusal)
            if self.hides_causes:
                parent.group = f"group-{parent.id}"
                for _ in range(count):
                    self.operation("insert", zone, error=refusal).group = parent.group
                parent.errors = []
            what = f"Requested minimum count of {least} VMs could not be created."
            parent.errors.insert(0, {"code": "VM_MIN_COUNT_NOT_REACHED", "message": what})
            return parent
        self._count(client_id, count, made)
        for name in names[:made]:
            self._make(zone, name, machine, {**properties, "name": name})
        return self.operation("bulkInsert", zone, client_id=client_id, error=refusal)

    def delete(self, zone: str, name: str, client_id: str = "") -> Operation:
        """Remove a machine, and its disk with it."""
        self.need("compute.instances.delete")
        vm = self.named(zone, name)
        vm.status = "STOPPING"
        self.hooks.ended(vm)
        return self.operation("delete", zone, client_id=client_id, vm=vm)

    def preempt(self, name: str, *, notice_s: float = 30.0) -> None:
        """Take a Spot machine: its metadata says so first, then its power goes."""
        with self.lock:
            vm = next(vm for vm in self.there() if vm.name == name)
            assert vm.spot, "only a Spot machine is preempted"
            if notice_s > 0:
                self.hooks.warned(vm, notice_s)
            self.after(notice_s, lambda: self._take(vm))
            self.advance()

    def kill(self, name: str) -> None:
        """Cut a machine's power without notice; the cloud still lists it as running."""
        with self.lock:
            self.hooks.ended(next(vm for vm in self.there() if vm.name == name))

    def _take(self, vm: Vm) -> None:
        if not vm.is_there or vm.status != "RUNNING":
            return
        self.hooks.ended(vm)
        vm.off_at = self.now()
        happened = self._operation("compute.instances.preempted", vm.zone, vm=vm)
        happened.ended_at = self.now()
        is_deleted = vm.body["scheduling"].get("instanceTerminationAction") == "DELETE"
        vm.status = "STOPPING" if is_deleted else "TERMINATED"
        if is_deleted:
            self.operation("delete", vm.zone, vm=vm)

    def _make(self, zone: str, name: str, machine: str, body: Mapping[str, Any]) -> Vm:
        offer, spot = self.offers[machine], _is_spot(body)
        cards = body.get("guestAccelerators") or ()
        gpus = offer.gpus + sum(int(card["acceleratorCount"]) for card in cards)
        price = offer.spot_usd_per_hour if spot else offer.usd_per_hour
        metric = offer.metric
        for card in cards:
            kind = card["acceleratorType"].rpartition("/")[2]
            metric = kind.upper().replace("-TESLA", "").replace("-", "_") + "_GPUS"
        vm = Vm(
            next(self._numbers), name, zone, machine, spot, gpus, metric, price, self.now(),
            {"metadata": {}, "scheduling": {}, "labels": {}, "disks": [], **body},
            boots=self.dead == 0, has_gpu=self.blind == 0,
        )  # fmt: skip
        self.dead, self.blind = max(self.dead - 1, 0), max(self.blind - 1, 0)
        self.vms.append(vm)
        key = (zone, machine, spot)
        if key in self.stock:
            self.stock[key] -= 1
        self.after(self.boot_s, lambda: self._boot(vm))
        return vm

    def _boot(self, vm: Vm) -> None:
        if vm.is_there and vm.status == "PROVISIONING":
            vm.status = "RUNNING"
            if vm.boots:
                self.hooks.booted(vm)

    def _end(self, vm: Vm) -> None:
        if vm.ended_at is None:
            vm.ended_at = self.now()

    # ---- groups ---------------------------------------------------------------------------------

    def create_in_group(
        self, group: Group, configs: list[dict[str, Any]], client_id: str
    ) -> Operation:
        """Order machines by name; whether they are available shows later."""
        self.need("compute.instanceGroupManagers.update")
        known = self._known(client_id)
        if known is not None:
            return known
        for config in configs:
            if config["name"] in group.wanted:
                raise ApiError(400, "invalid", f"Instance {config['name']} already exists")
        self._count(client_id, len(configs), len(configs))
        for config in configs:
            group.wanted[config["name"]] = config.get("preservedState", {}).get("metadata", {})
        self.after(0.0, lambda: self.fill(group))
        return self.operation("compute.instanceGroupManagers.createInstances", group.zone,
                              client_id=client_id)  # fmt: skip

    def resize(self, group: Group, size: int) -> Operation:
        """Set a group's target size; the newest machines are deleted first."""
        self.need("compute.instanceGroupManagers.update")
        while len(group.wanted) < size:
            group.wanted[f"{group.name}-{next(self._numbers) % 10**6}"] = {}
        for name in list(group.wanted)[size:]:
            self.remove_from_group(group, name)
        self.after(0.0, lambda: self.fill(group))
        return self.operation("compute.instanceGroupManagers.resize", group.zone)

    def remove_from_group(self, group: Group, name: str) -> None:
        """Take one out of a group, and delete it."""
        group.wanted.pop(name, None)
        group.errors.pop(name, None)
        for vm in self.there(group.zone):
            if vm.name == name:
                self.delete(group.zone, name)

    def fill(self, group: Group) -> None:
        """Make what a group lacks, as far as it is available."""
        names = {vm.name for vm in self.there(group.zone)}
        properties = group.properties
        for name, metadata in group.wanted.items():
            if name in names:
                continue
            machine, spot = properties["machineType"], _is_spot(properties)
            refusal = self._refusal(group.zone, machine, spot, 1)
            if refusal is not None:
                group.errors[name] = refusal
                continue
            items = [{"key": key, "value": value} for key, value in metadata.items()]
            have = properties.get("metadata", {}).get("items", [])
            body = {**properties, "name": name, "metadata": {"items": [*have, *items]}}
            self._make(group.zone, name, machine, body)
            group.errors.pop(name, None)

    # ---- refusals and operations ----------------------------------------------------------------

    def need(self, permission: str) -> None:
        """Refuse a caller without the permission."""
        self.needed.add(permission)
        if permission in self.denied or permission not in self.granted:
            what = f"Required '{permission}' permission for 'projects/{self.project}'"
            raise ApiError(403, "forbidden", what)

    def _need_to_create(self, body: Mapping[str, Any]) -> None:
        """Refuse a caller who lacks a permission for a part of a machine."""
        self.need("compute.instances.create")
        interfaces = body.get("networkInterfaces", [])
        made = [disk.get("initializeParams", {}) for disk in body.get("disks", [])]
        parts = {
            "compute.instances.setLabels": "labels" in body,
            "compute.instances.setMetadata": "metadata" in body,
            "compute.instances.setServiceAccount": "serviceAccounts" in body,
            "compute.instances.setTags": "tags" in body,
            "compute.disks.create": any(made),
            "compute.disks.setLabels": any("labels" in one for one in made),
            "compute.images.useReadOnly": any("sourceImage" in one for one in made),
            "compute.subnetworks.use": bool(interfaces),
            "compute.subnetworks.useExternalIp": any("accessConfigs" in i for i in interfaces),
            "compute.resourcePolicies.use": "resourcePolicies" in body,
        }
        for permission, is_needed in parts.items():
            if is_needed:
                self.need(permission)

    def operation(
        self,
        kind: str,
        zone: str,
        *,
        client_id: str = "",
        vm: Vm | None = None,
        error: dict[str, Any] | None = None,
    ) -> Operation:
        """Begin an operation, which ends by itself unless a test made it hang."""
        one = self._operation(kind, zone, client_id=client_id, vm=vm)
        if client_id:
            self._seen[client_id] = one
        if error is not None:
            one.errors, one.http_status = [error], 503 if error["code"] == STOCKOUT else 403
        if self.hung > 0:
            self.hung -= 1
            return one

        def end() -> None:
            one.ended_at = self.now()
            if kind == "delete" and vm is not None:
                self._end(vm)

        self.after(self.operation_s, end)
        return one

    def _operation(
        self, kind: str, zone: str, *, client_id: str = "", vm: Vm | None = None
    ) -> Operation:
        one = Operation(next(self._numbers), kind, zone, self.now(), client_id)
        if vm is not None:
            one.target_id, one.target_name = vm.id, vm.name
        self.operations[one.name] = one
        return one

    def _known(self, client_id: str) -> Operation | None:
        """The same request id, sent again, is answered with the first operation, for a while."""
        known = self._seen.get(client_id)
        is_old = known is not None and self.now() > known.inserted_at + self.remembers_s
        return None if is_old else known

    def _count(self, client_id: str, ordered: int, made: int) -> None:
        """Count a group's ordered machines as made: it retries until it has them."""
        if client_id:
            self.ordered.setdefault(client_id, ordered)
            self.made[client_id] += made

    def _free(self, zone: str, name: str) -> None:
        if any(vm.name == name for vm in self.there(zone)):
            what = f"projects/{self.project}/zones/{zone}/instances/{name}"
            raise ApiError(409, "alreadyExists", f"The resource '{what}' already exists")

    def _offered(self, zone: str, machine: str, body: Mapping[str, Any]) -> None:
        if zone not in self.zones:
            raise ApiError(400, "invalid", f"Invalid value for field 'zone': '{zone}'. Unknown.")
        if machine not in self.offers or (zone, machine) in self.not_offered:
            what = f"Machine type with name '{machine}' does not exist in zone '{zone}'."
            raise ApiError(400, "invalid", f"Invalid value for field 'machineType': {what}")
        for card in body.get("guestAccelerators") or ():
            kind = card["acceleratorType"].rpartition("/")[2]
            if kind not in ATTACHABLE or (zone, kind) in self.not_offered:
                what = f"projects/{self.project}/zones/{zone}/acceleratorTypes/{kind}"
                raise ApiError(404, "notFound", f"The resource '{what}' was not found")

    def _metric(self, metric: str, *, spot: bool, zone: str) -> str:
        """Spot machines draw on a quota of their own where there is one."""
        own = f"PREEMPTIBLE_{metric}"
        return own if spot and self.quotas.get((self.zones[zone], own), 0) > 0 else metric

    def _refusal(self, zone: str, machine: str, spot: bool, count: int) -> dict[str, Any] | None:
        offer, region = self.offers[machine], self.zones[zone]
        if self.stock.get((zone, machine, spot), count) < count:
            what = f"The zone '{zone}' does not have enough resources available"
            return {"code": STOCKOUT, "message": f"{what} to fulfill the request. '({machine})'."}
        metric = self._metric(offer.metric, spot=spot, zone=zone)
        limits = [(region, metric)] if spot else [(region, metric), ("global", "GPUS_ALL_REGIONS")]
        for where, name in limits:
            limit = self.quotas.get((where, name), self.families.get((where, name)))
            if limit is not None and self.used(where, name) + count * offer.gpus > limit:
                what = f"Quota '{name}' exceeded. Limit: {limit} in region {where}."
                return {"code": "QUOTA_EXCEEDED", "message": what}
        return None


def _is_spot(properties: Mapping[str, Any]) -> bool:
    return bool(properties.get("scheduling", {}).get("provisioningModel") == "SPOT")
