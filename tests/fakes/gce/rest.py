"""The fake cloud's REST API: paths, JSON, pages and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tests.fakes.gce import resize_requests
from tests.fakes.gce.answers import Answer, Reply, fits, newer_refusal, refusal, written
from tests.fakes.gce.cloud import ATTACHABLE, Cloud
from tests.fakes.gce.resources import ApiError, Group, InjectedFailure, Network, Operation, Vm

ROOT = "/compute/v1/projects/{project}"
REGION = ROOT + "/regions/{region}"
ZONE = ROOT + "/zones/{zone}"
GROUP = ZONE + "/instanceGroupManagers/{group}"
IMAGES = "/compute/v1/projects/{owner}/global/images"
QUOTA_INFOS = "/v1/projects/{project}/locations/global/services/compute.googleapis.com/quotaInfos"


@dataclass(frozen=True, slots=True)
class Request:
    """A request, from either transport."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Answer = field(default_factory=dict)
    match_info: Mapping[str, str] = field(default_factory=dict)
    """The parts of the path that its route names."""


class Rest:
    """Answers requests for one cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.skus: list[Answer] = []
        routes: list[tuple[str, str, Callable[[Request], Answer]]] = [
            ("GET", ROOT, self.project),
            ("GET", REGION, self.region),
            ("GET", ROOT + "/zones", self.zones),
            ("GET", ROOT + "/global/networks/{network}", self.network),
            ("GET", REGION + "/firewallPolicies/getEffectiveFirewalls", self.firewalls),
            ("GET", REGION + "/subnetworks/{subnet}", self.subnetwork),
            ("GET", REGION + "/routers", self.routers),
            ("GET", REGION + "/resourcePolicies/{policy}", self.policy),
            ("GET", ZONE + "/reservations/{reservation}", self.reservation),
            ("GET", IMAGES + "/family/{name}", self.image),
            ("GET", IMAGES + "/{name}", self.image),
            ("POST", "/v1/projects/-/serviceAccounts/{account}", self.account),
            ("GET", ROOT + "/aggregated/machineTypes", self.machine_types),
            ("GET", ROOT + "/aggregated/acceleratorTypes", self.accelerator_types),
            ("GET", ROOT + "/aggregated/instances", self.all_instances),
            ("GET", ROOT + "/aggregated/operations", self.all_operations),
            ("GET", ZONE + "/instances", self.instances),
            ("POST", ZONE + "/instances", self.insert),
            ("POST", ZONE + "/instances/bulkInsert", self.bulk_insert),
            ("GET", ZONE + "/instances/{name}", self.instance),
            ("DELETE", ZONE + "/instances/{name}", self.delete),
            ("POST", ZONE + "/instances/{name}/simulateMaintenanceEvent", self.simulate),
            ("GET", ZONE + "/operations", self.operations),
            ("GET", ZONE + "/operations/{name}", self.operation),
            ("GET", ROOT + "/global/instanceTemplates/{group}", self.template),
            ("GET", GROUP, self.group),
            ("POST", GROUP + "/createInstances", self.group_create),
            ("POST", GROUP + "/deleteInstances", self.group_delete),
            ("POST", GROUP + "/resize", self.group_resize),
            ("POST", GROUP + "/listManagedInstances", self.group_list),
            ("POST", GROUP + "/resizeRequests", self.enqueue),
            ("GET", GROUP + "/resizeRequests", self.queue),
            ("POST", GROUP + "/resizeRequests/{name}/cancel", self.cancel),
            ("GET", "/v1/services/{service}/skus", self.billing),
            ("GET", QUOTA_INFOS + "/{quota}", self.quota_info),
        ]
        self._routes = [
            (method, re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path)), answer)
            for method, path, answer in routes
        ]

    def injected_failure(self, request: Request) -> InjectedFailure | None:
        """Record the request and return its injected failure, if any."""
        line = f"{request.method} {request.path}"
        with self.cloud.lock:
            self.cloud.asked.append(line)
            for failure in self.cloud.failures:
                if failure.times > 0 and re.search(failure.path, line):
                    failure.times -= 1
                    return failure
        return None

    def respond(self, request: Request, failure: InjectedFailure | None) -> Reply:
        """Answer with an injected failure, which also says whether the request takes effect."""
        if failure is None or failure.status == 0:
            return self._usual(request)
        if failure.is_done:
            self._usual(request)
        wait = {} if failure.retry_after_s is None else {"Retry-After": str(failure.retry_after_s)}
        return refusal(ApiError(failure.status, failure.reason, failure.message), wait)

    def _usual(self, request: Request) -> Reply:
        with self.cloud.lock:
            self.cloud.advance()
            try:
                return Reply(200, self._answer(request))
            except ApiError as error:
                return newer_refusal(error) if request.path.startswith("/v1/") else refusal(error)

    def _answer(self, request: Request) -> Answer:
        for method, path, answer in self._routes:
            found = path.fullmatch(request.path)
            if found is not None and method == request.method:
                self._authorize(found.groupdict())
                return answer(replace(request, match_info=found.groupdict()))
        raise ApiError(404, "notFound", f"the fake has no {request.method} {request.path}")

    def _authorize(self, names: Mapping[str, str]) -> None:
        if self.cloud.is_expired:
            what = "Request had invalid authentication credentials. Expected OAuth 2 access token."
            raise ApiError(401, "authError", what)
        project = names.get("project", self.cloud.project)
        if project != self.cloud.project:
            what = f"The resource 'projects/{project}' was not found"
            raise ApiError(404, "notFound", what)

    # ---- projects, zones and machine types ------------------------------------------------------

    def project(self, _: Request) -> Answer:
        self.cloud.need("compute.projects.get")
        return {
            "name": self.cloud.project,
            "id": "7",
            "defaultServiceAccount": "7-compute@developer.gserviceaccount.com",
            "quotas": self._quotas("global"),
        }

    def region(self, request: Request) -> Answer:
        self.cloud.need("compute.regions.get")
        name = request.match_info["region"]
        if name not in self.cloud.zones.values():
            raise ApiError(404, "notFound", f"The resource 'regions/{name}' was not found")
        return {"name": name, "status": "UP", "quotas": self._quotas(name)}

    # ---- networks, images, accounts -------------------------------------------------------------

    def _network(self, name: str) -> Network:
        if name not in self.cloud.networks:
            raise ApiError(404, "notFound", f"The resource 'networks/{name}' was not found")
        return self.cloud.networks[name]

    def network(self, request: Request) -> Answer:
        self.cloud.need("compute.networks.get")
        name = request.match_info["network"]
        found = self._network(name)
        return {
            "name": name,
            "autoCreateSubnetworks": found.is_automatic,
            "networkFirewallPolicyEnforcementOrder": found.order,
        }

    def firewalls(self, request: Request) -> Answer:
        """All that a region's instances are behind; policies have no short name here."""
        self.cloud.need("compute.networks.getRegionEffectiveFirewalls")
        found = self._network(request.query["network"].rpartition("/")[2])
        region = request.match_info["region"]
        policies = [*found.policies, *found.regional.get(region, ())]
        return {"firewalls": found.rules, "firewallPolicys": policies}

    def subnetwork(self, request: Request) -> Answer:
        self.cloud.need("compute.subnetworks.get")
        region, name = request.match_info["region"], request.match_info["subnet"]
        for own, network in self.cloud.networks.items():
            found = network.subnet(region, name, own=own)
            if found is not None:
                return {"name": name, "network": self._link(f"global/networks/{own}"), **found}
        raise ApiError(404, "notFound", f"The resource 'subnetworks/{name}' was not found")

    def routers(self, request: Request) -> Answer:
        self.cloud.need("compute.routers.list")
        region = request.match_info["region"]
        found: list[Answer] = [
            {"name": "r", "network": self._link(f"global/networks/{own}"), "nats": [nat]}
            for own, network in self.cloud.networks.items()
            for nat in network.routers.get(region, [])
        ]
        return self._paged(request, found)

    def policy(self, request: Request) -> Answer:
        self.cloud.need("compute.resourcePolicies.get")
        name = request.match_info["policy"]
        if name not in self.cloud.placements:
            raise ApiError(404, "notFound", f"The resource 'resourcePolicies/{name}' was not found")
        return {"name": name}

    def reservation(self, request: Request) -> Answer:
        self.cloud.need("compute.reservations.get")
        name = request.match_info["reservation"]
        if name not in self.cloud.reservations:
            raise ApiError(404, "notFound", f"The resource 'reservations/{name}' was not found")
        machine = self.cloud.reservations[name]
        return {
            "name": name,
            "specificReservation": {"instanceProperties": {"machineType": machine}},
        }

    def image(self, request: Request) -> Answer:
        own = request.match_info["owner"] == self.cloud.project
        is_family = "/family/" in request.path
        if own:  # Those of others are public.
            self.cloud.need(f"compute.images.get{'FromFamily' if is_family else ''}")
        path = request.path.partition("projects/")[2]
        if path not in self.cloud.images:
            raise ApiError(404, "notFound", f"The resource 'projects/{path}' was not found")
        return {"name": request.match_info["name"], **self.cloud.images[path]}

    def account(self, request: Request) -> Answer:
        account, _, verb = request.match_info["account"].partition(":")
        assert verb == "testIamPermissions", verb
        if account not in self.cloud.accounts:
            raise ApiError(404, "notFound", f"Unknown service account {account}")
        asked = set(request.body["permissions"])
        return {"permissions": sorted(asked - self.cloud.denied)}

    def _quotas(self, where: str) -> list[Answer]:
        return [
            {"metric": metric, "limit": limit, "usage": self.cloud.used(where, metric)}
            for (place, metric), limit in sorted(self.cloud.quotas.items())
            if place == where
        ]

    def zones(self, request: Request) -> Answer:
        self.cloud.need("compute.zones.list")
        found = [
            {"name": zone, "region": self._link(f"regions/{region}"), "status": "UP"}
            for zone, region in sorted(self.cloud.zones.items())
        ]
        return self._paged(request, found)

    def machine_types(self, request: Request) -> Answer:
        self.cloud.need("compute.machineTypes.list")
        found = [
            (f"zones/{zone}", {"name": name, "zone": zone, "guestCpus": 12})
            for zone in sorted(self.cloud.zones)
            for name in self.cloud.offers
            if (zone, name) not in self.cloud.not_offered
        ]
        return self._by_scope(request, "machineTypes", found)

    def accelerator_types(self, request: Request) -> Answer:
        self.cloud.need("compute.acceleratorTypes.list")
        built_in = {one.accelerator for one in self.cloud.offers.values() if one.accelerator}
        found = [
            (f"zones/{zone}", {"name": name, "zone": self._link(f"zones/{zone}")})
            for zone in sorted(self.cloud.zones)
            for name in sorted(built_in.union(ATTACHABLE))
            if (zone, name) not in self.cloud.not_offered
        ]
        return self._by_scope(request, "acceleratorTypes", found)

    def billing(self, request: Request) -> Answer:
        if "billing" in self.cloud.denied:  # An API to enable, no permission of a role.
            raise ApiError(403, "forbidden", "Cloud Billing API has not been used")
        start = int(request.query.get("pageToken") or 0)
        more = str(start + 2) if start + 2 < len(self.skus) else ""
        return {"skus": self.skus[start : start + 2], "nextPageToken": more}

    def quota_info(self, request: Request) -> Answer:
        """The limits that no region lists."""
        if not self.cloud.has_quotas_api:
            what = "Cloud Quotas API has not been used in project 7 before or it is disabled."
            raise ApiError(403, "SERVICE_DISABLED", what)
        self.cloud.need("cloudquotas.quotas.get")
        name = request.match_info["quota"]
        if name != "GPUS-PER-GPU-FAMILY-per-project-region":
            raise ApiError(404, "notFound", f"Quota info {name} was not found")
        told = [
            {
                "dimensions": {"gpu_family": metric.removesuffix("_GPUS")},
                "details": {"value": str(limit)},
                "applicableLocations": [region],
            }
            for (region, metric), limit in self.cloud.families.items()
        ]
        return {"quotaId": name, "dimensions": ["region", "gpu_family"], "dimensionsInfos": told}

    # ---- machines -------------------------------------------------------------------------------

    def all_instances(self, request: Request) -> Answer:
        self.cloud.need("compute.instances.list")
        found = [(f"zones/{vm.zone}", self.vm(vm)) for vm in self.cloud.there()]
        return self._by_scope(request, "instances", found)

    def instances(self, request: Request) -> Answer:
        self.cloud.need("compute.instances.list")
        zone = request.match_info["zone"]
        if zone in self.cloud.unreachable:
            raise ApiError(503, "backendError", f"zone {zone} is not reachable")
        return self._paged(request, [self.vm(vm) for vm in self.cloud.there(zone)])

    def instance(self, request: Request) -> Answer:
        self.cloud.need("compute.instances.get")
        return self.vm(self.cloud.named(request.match_info["zone"], request.match_info["name"]))

    def insert(self, request: Request) -> Answer:
        zone = request.match_info["zone"]
        return self.op(self.cloud.insert(zone, request.body, request.query.get("requestId", "")))

    def bulk_insert(self, request: Request) -> Answer:
        zone = request.match_info["zone"]
        return self.op(
            self.cloud.bulk_insert(zone, request.body, request.query.get("requestId", ""))
        )

    def delete(self, request: Request) -> Answer:
        zone, name = request.match_info["zone"], request.match_info["name"]
        return self.op(self.cloud.delete(zone, name, request.query.get("requestId", "")))

    def simulate(self, request: Request) -> Answer:
        vm = self.cloud.named(request.match_info["zone"], request.match_info["name"])
        notice = vm.body["scheduling"].get("preemptionNoticeDuration", {}).get("seconds", 30)
        self.cloud.preempt(vm.name, notice_s=float(notice))
        return self.op(self.cloud.operation("simulateMaintenanceEvent", vm.zone, vm=vm))

    def vm(self, vm: Vm) -> Answer:
        """A machine as its resource; Google lists the GPUs of its type, too."""
        offer = self.cloud.offers[vm.machine]
        kind = self._link(f"zones/{vm.zone}/acceleratorTypes/{offer.accelerator}")
        card = {"acceleratorType": kind, "acceleratorCount": offer.gpus}
        return {
            **({"guestAccelerators": [card]} if offer.gpus else {}),
            **{key: value for key, value in vm.body.items() if key != "machineType"},
            "id": str(vm.id),
            "name": vm.name,
            "zone": self._link(f"zones/{vm.zone}"),
            "machineType": self._link(f"zones/{vm.zone}/machineTypes/{vm.machine}"),
            "status": vm.status,
            "creationTimestamp": written(vm.created_at),
            **({} if vm.off_at is None else {"lastStopTimestamp": written(vm.off_at)}),
        }

    # ---- operations -----------------------------------------------------------------------------

    def all_operations(self, request: Request) -> Answer:
        self.cloud.need("compute.globalOperations.list")
        self.cloud.need("compute.zoneOperations.list")
        found = [(f"zones/{one.zone}", self.op(one)) for one in self.cloud.operations.values()]
        if request.query.get("orderBy") == "creationTimestamp desc":
            found.reverse()
        return self._by_scope(request, "operations", found)

    def operations(self, request: Request) -> Answer:
        self.cloud.need("compute.zoneOperations.list")
        zone, all_ = request.match_info["zone"], self.cloud.operations.values()
        return self._paged(request, [self.op(one) for one in all_ if one.zone == zone])

    def operation(self, request: Request) -> Answer:
        self.cloud.need("compute.zoneOperations.get")
        name = request.match_info["name"]
        if name not in self.cloud.operations:
            raise ApiError(404, "notFound", f"The resource 'operations/{name}' was not found")
        return self.op(self.cloud.operations[name])

    def op(self, one: Operation) -> Answer:
        """An operation as its resource; its errors show once it has ended."""
        resource: Answer = {
            "id": str(one.id),
            "name": one.name,
            "operationType": one.type,
            "zone": self._link(f"zones/{one.zone}"),
            "insertTime": written(one.inserted_at),
            "status": "RUNNING" if one.ended_at is None else "DONE",
        }
        if one.group:
            resource["operationGroupId"] = one.group
        if one.client_id:
            resource["clientOperationId"] = one.client_id
        if one.target_id:
            resource["targetId"] = str(one.target_id)
            resource["targetLink"] = self._link(f"zones/{one.zone}/instances/{one.target_name}")
        if one.ended_at is not None:
            resource["endTime"] = written(one.ended_at)
            if one.errors:
                resource["error"] = {"errors": one.errors}
                resource["httpErrorStatusCode"] = one.http_status
        return resource

    # ---- groups ---------------------------------------------------------------------------------

    def _group(self, request: Request) -> Group:
        name = request.match_info["group"]
        if name not in self.cloud.groups:
            what = f"The resource 'instanceGroupManagers/{name}' was not found"
            raise ApiError(404, "notFound", what)
        return self.cloud.groups[name]

    def group(self, request: Request) -> Answer:
        self.cloud.need("compute.instanceGroupManagers.get")
        group = self._group(request)
        template = self._link(f"global/instanceTemplates/{group.name}")
        return {
            "name": group.name,
            "targetSize": len(group.wanted),
            "instanceTemplate": template,
        }

    def template(self, request: Request) -> Answer:
        """Its template has a group's name."""
        self.cloud.need("compute.instanceTemplates.get")
        group = self._group(request)
        return {"name": group.name, "properties": group.properties}

    def group_create(self, request: Request) -> Answer:
        group, client_id = self._group(request), request.query.get("requestId", "")
        return self.op(self.cloud.create_in_group(group, request.body["instances"], client_id))

    def group_delete(self, request: Request) -> Answer:
        self.cloud.need("compute.instanceGroupManagers.update")
        group = self._group(request)
        for link in request.body["instances"]:
            name = link.rpartition("/")[2]
            if name not in group.wanted:
                raise ApiError(400, "invalid", f"Instance '{name}' is not a member of the group")
            self.cloud.remove_from_group(group, name)
        kind = "compute.instanceGroupManagers.deleteInstances"
        return self.op(self.cloud.operation(kind, group.zone))

    def group_resize(self, request: Request) -> Answer:
        return self.op(self.cloud.resize(self._group(request), int(request.query["size"])))

    def group_list(self, request: Request) -> Answer:
        self.cloud.need("compute.instanceGroupManagers.get")
        group = self._group(request)
        there = {vm.name: vm for vm in self.cloud.there(group.zone)}
        found = []
        for name in group.wanted:
            one: Answer = {"instance": self._link(f"zones/{group.zone}/instances/{name}")}
            one |= {"name": name, "currentAction": "CREATING"}
            if name in there:
                one |= {"id": str(there[name].id), "instanceStatus": there[name].status}
                one["currentAction"] = "NONE" if there[name].status == "RUNNING" else "CREATING"
            if name in group.errors:
                one["lastAttempt"] = {"errors": {"errors": [group.errors[name]]}}
            found.append(one)
        return {"managedInstances": found}

    def enqueue(self, request: Request) -> Answer:
        return self.op(resize_requests.enqueue(self.cloud, self._group(request), request.body))

    def cancel(self, request: Request) -> Answer:
        name = request.match_info["name"]
        return self.op(resize_requests.cancel(self.cloud, self._group(request), name))

    def queue(self, request: Request) -> Answer:
        return self._paged(request, resize_requests.listed(self.cloud, self._group(request)))

    # ---- lists ----------------------------------------------------------------------------------

    def _paged(self, request: Request, found: list[Answer]) -> Answer:
        found = [one for one in found if fits(one, request.query.get("filter", ""))]
        start = int(request.query.get("pageToken") or 0)
        end = start + self._page(request)
        more = {"nextPageToken": str(end)} if end < len(found) else {}
        return {"items": found[start:end], **more}

    def _by_scope(self, request: Request, kind: str, found: list[tuple[str, Answer]]) -> Answer:
        """An aggregated list: a page has some items of each zone, and warnings for empty zones."""
        unseen = {f"zones/{zone}" for zone in self.cloud.unreachable}
        if unseen and request.query.get("returnPartialSuccess") != "true":
            raise ApiError(503, "backendError", f"{', '.join(sorted(unseen))}: not reachable")
        rule = request.query.get("filter", "")
        found = [(zone, one) for zone, one in found if zone not in unseen and fits(one, rule)]
        start = int(request.query.get("pageToken") or 0)
        end = start + self._page(request)
        items: dict[str, Answer] = {}
        for zone in sorted(self.cloud.zones):
            here = [one for place, one in found[start:end] if place == f"zones/{zone}"]
            warning = {"code": "NO_RESULTS_ON_PAGE", "message": "No results on this page."}
            if f"zones/{zone}" in unseen and self.cloud.warns:
                warning = {"code": "UNREACHABLE", "message": "The scope is not reachable."}
            items[f"zones/{zone}"] = {kind: here} if here else {"warning": warning}
        more = {"nextPageToken": str(end)} if end < len(found) else {}
        return {"items": items, "unreachables": sorted(unseen), **more}

    def _page(self, request: Request) -> int:
        return min(self.cloud.page, int(request.query.get("maxResults") or 500))

    def _link(self, path: str) -> str:
        return f"https://www.googleapis.com/compute/v1/projects/{self.cloud.project}/{path}"
