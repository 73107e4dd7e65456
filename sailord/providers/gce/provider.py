"""The provider for Google Compute Engine.

A request is sent once; without an answer it is ``InDoubt`` until an observation settles it. Names
are derived from the request id, so that a repeated request cannot make an instance twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from sailord.providers.gce import flex_start, instance_groups, preflight
from sailord.providers.gce.billing import Billing
from sailord.providers.gce.client import GceClient, find_credentials
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.cures import cure_of
from sailord.providers.gce.errors import NO_CAUSE, GceError, gce_error
from sailord.providers.gce.family_quotas import FamilyLimits, FamilyQuotas
from sailord.providers.gce.observe import (
    HISTORY_S,
    operation_history,
    parse_time,
    read_aggregated,
    read_instance,
    stopped_at,
)
from sailord.providers.gce.prices import prices_of
from sailord.providers.gce.quotas import (
    limits_by_region,
    needs_families,
    quotas_of,
    read_limits,
)
from sailord.providers.gce.requests import (
    CLUSTER_LABEL,
    bulk_insert_body,
    instance_names,
    request_uuid,
)
from sailord.providers.interface import (
    DeleteResult,
    Granted,
    InDoubt,
    Instance,
    InstanceRequest,
    Observation,
    Pool,
    Provider,
    ProviderError,
    Queued,
    QuotaUsage,
    Refused,
    RequestOutcome,
)
from simulator.documents.problems import Problem
from simulator.hardware.catalogue import Catalogue

log = structlog.get_logger("sailord")

NOT_FOUND, CONFLICT = 404, 409


class _OperationTimeoutError(Exception):
    """An operation did not end in time."""


class GceProvider(Provider):
    """The instances of one project with one cluster's label."""

    def __init__(
        self,
        config: GceConfig,
        catalogue: Catalogue,
        api: GceClient,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._catalogue = catalogue
        self._api = api
        self._now = now
        self._billing = Billing(api, config)
        self._families = FamilyQuotas(api, config, now)
        self._requests: dict[str, str] = {}
        """Our request ids by Google's, where they differ, and by names of requests that waited."""
        self._troubles: tuple[str, ...] = ()
        """What was logged of the queues, and still holds."""
        self._seen: dict[str, Instance] = {}
        """By number, as last observed: a deletion needs the zone."""

    @property
    def pools(self) -> Sequence[Pool]:
        """Return each combination of the configured zones, machine types and contracts."""
        return self._config.pools

    async def check(self) -> Sequence[Problem]:
        """Raise ``InputError`` with every mistake that prevents renting."""
        self._families = FamilyQuotas(self._api, self._config, self._now)  # Read anew.
        warnings = await preflight.check(self._api, self._config, self._families)
        trouble = await self._billing.read()
        return warnings if trouble is None else (*warnings, trouble)

    # ---- observing ------------------------------------------------------------------------------

    async def observe(self) -> Observation:
        """List all instances with our label, and the operations on them."""
        at = self._now()
        rule = f'labels.{CLUSTER_LABEL}="{self._config.cluster_name}"'
        try:
            pages, operations, queue = await asyncio.gather(
                self._api.pages("Instances", "aggregated_list", filter=rule),
                self._api.pages(
                    *("GlobalOperations", "aggregated_list"),
                    max_results=500,
                    order_by="creationTimestamp desc",
                    is_enough=lambda page: _is_old(page, at - HISTORY_S),
                ),
                flex_start.read(self._api, self._config),
            )
        except GceError as failure:
            raise ProviderError(failure.text) from failure
        self._requests |= queue.ids
        for trouble in queue.troubles:
            if trouble not in self._troubles:
                log.warning(trouble)
        self._troubles = queue.troubles
        resources, unseen = read_aggregated(pages, "instances")
        found = tuple(self._instance(one) for one in resources)
        self._seen = {
            **{i.id: i for i in self._seen.values() if i.pool.zone in unseen},
            **{i.id: i for i in found},
        }
        past = operation_history(read_aggregated(operations, "operations")[0], at)
        return Observation(
            at=at,
            instances=found,
            unseen_zones=unseen,
            preemptions=past.preemptions,
            pending_requests=frozenset(
                self._requests.get(one, one) for one in past.pending_requests
            ),
            queued=queue.waiting,
            unseen_queues=queue.unseen,
            refused=queue.refused,
            ended_at={**past.ended_at, **stopped_at(resources)},
        )

    def _instance(self, resource: Any) -> Instance:
        return read_instance(resource, self._requests, self._catalogue)

    # ---- creating -------------------------------------------------------------------------------

    async def create(self, ask: InstanceRequest) -> RequestOutcome:
        """Make as many instances as available, and wait for the outcome."""
        assert ask.count > 0, "a request for no instance"
        config = self._config
        self._requests[request_uuid(ask.request_id)] = ask.request_id
        grouped = ask.pool in config.groups
        if ask.pool.flex:
            return await self._queue(ask)
        try:
            operation = await (
                instance_groups.create(self._api, config, ask) if grouped else self._order(ask)
            )
        except GceError as failure:
            if failure.is_transient:
                return InDoubt(ask.request_id, failure.text)
            # The names are ours: this request succeeded before.
            is_repeated = failure.status == CONFLICT or "already exists" in failure.text
            return await self._outcome(ask, failure) if is_repeated else self._refuse(ask, failure)
        try:
            refusal = await self._settle(ask.pool.zone, operation)
            if grouped and refusal is None:
                refusal = await instance_groups.wait_created(self._api, config, ask)
        except GceError as failure:
            return InDoubt(ask.request_id, self._explain(failure))
        except _OperationTimeoutError as error:
            return InDoubt(ask.request_id, str(error))
        return await self._outcome(ask, refusal)

    async def _queue(self, ask: InstanceRequest) -> RequestOutcome:
        try:
            await flex_start.create(self._api, self._config, ask)
        except GceError as failure:
            if failure.is_transient:
                return InDoubt(ask.request_id, failure.text)
            if failure.status != CONFLICT:  # Its name is ours: it was put there before.
                return self._refuse(ask, failure)
        return Queued(ask.request_id)

    async def cancel(self, ask: InstanceRequest) -> str:
        """Withdraw a request from Google's queue."""
        try:
            await flex_start.cancel(self._api, self._config, ask)
        except GceError as failure:
            return self._explain(failure)
        return ""

    async def _order(self, ask: InstanceRequest) -> Any:
        return await self._api.call(
            *("Instances", "bulk_insert_unary"),
            zone=ask.pool.zone,
            request_id=request_uuid(ask.request_id),
            bulk_insert_instance_resource_resource=bulk_insert_body(ask, self._config),
        )

    async def _settle(self, zone: str, operation: Any) -> GceError | None:
        """Wait until an operation ends; return its error, if any."""
        loop = asyncio.get_running_loop()
        deadline, name, trouble = loop.time() + self._config.operation_s, operation.name, ""
        while operation.status.name != "DONE":
            if loop.time() > deadline:
                told = f"operation {name} did not end within {self._config.operation_s:.0f} s"
                raise _OperationTimeoutError(f"{told}{f' ({trouble})' if trouble else ''}")
            await asyncio.sleep(self._config.poll_s)
            try:
                operation = await self._api.call("ZoneOperations", "get", zone=zone, operation=name)
            except GceError as failure:
                if failure.kind == "permission":
                    raise
                # The operation continues even if polling fails.
                trouble = failure.text
        errors = [(error.code, error.message) for error in operation.error.errors]
        if errors and {code for code, _ in errors} <= NO_CAUSE:
            errors += await self._causes(zone, operation.operation_group_id)
        status = operation.http_error_status_code
        return gce_error(status, errors, message=operation.http_error_message) if errors else None

    async def _causes(self, zone: str, group: str) -> list[tuple[str, str]]:
        """Return the errors of a bulk insert's single instances; none if they cannot be read.

        They name the cause where the error code of the bulk insert does not.
        """
        if not group:
            return []
        rule = f'operationGroupId="{group}"'
        try:
            pages = await self._api.pages("ZoneOperations", "list", zone=zone, filter=rule)
        except GceError:
            return []
        found = [
            (error.code, error.message)
            for page in pages
            for one in page.items
            for error in one.error.errors
        ]
        return [(code, text) for code, text in dict.fromkeys(found) if code not in NO_CAUSE]

    async def _outcome(self, ask: InstanceRequest, refusal: GceError | None) -> RequestOutcome:
        """Return what was made, by listing it."""
        names = set(instance_names(ask, self._config.cluster_name))
        try:
            pages = await self._api.pages(
                *("Instances", "list"),
                zone=ask.pool.zone,
                filter=f'labels.{CLUSTER_LABEL}="{self._config.cluster_name}"',
            )
        except GceError as failure:
            return InDoubt(ask.request_id, self._explain(failure))
        found = [one for page in pages for one in page.items if one.name in names]
        made = tuple(self._instance(one) for one in found)
        self._seen |= {instance.id: instance for instance in made}
        if refusal is not None and not made:
            return self._refuse(ask, refusal)
        return Granted(ask.request_id, made)

    def _refuse(self, ask: InstanceRequest, failure: GceError) -> Refused:
        return Refused(ask.request_id, failure.kind, self._explain(failure), failure.retry_after_s)

    def _explain(self, failure: GceError) -> str:
        cure = cure_of(failure, self._config)
        return f"{failure.text}; {cure}" if cure else failure.text

    # ---- deleting -------------------------------------------------------------------------------

    async def delete(self, ids: Sequence[str]) -> DeleteResult:
        """Delete instances by their numbers, with their disks."""
        wanted = tuple(dict.fromkeys(ids))
        failed: dict[str, str] = {}
        if any(one not in self._seen for one in wanted):
            try:
                look = await self.observe()
            except ProviderError as error:
                return DeleteResult((), dict.fromkeys(wanted, str(error)))
            if look.unseen_zones:
                text = f"no answer from {', '.join(look.unseen_zones)}"
                failed = {one: text for one in wanted if one not in self._seen}
        known = [one for one in wanted if one in self._seen]
        answers = await asyncio.gather(*(self._delete(self._seen[one]) for one in known))
        failed |= {one: why for one, why in zip(known, answers, strict=True) if why is not None}
        return DeleteResult(tuple(one for one in wanted if one not in failed), failed)

    async def _delete(self, instance: Instance) -> str | None:
        """Delete one instance; return why that failed."""
        # By number: another instance may have the name by now.
        one = {"zone": instance.pool.zone, "instance": instance.id}
        try:
            if instance.pool in self._config.groups:
                found = await self._api.call("Instances", "get", **one)
                if await self._is_removed(instance.pool, found.name):
                    return None
            await self._api.call("Instances", "delete_unary", **one)
        except GceError as failure:
            return None if failure.status == NOT_FOUND else self._explain(failure)
        return None

    async def _is_removed(self, pool: Pool, name: str) -> bool:
        """Delete through the group, which would otherwise replace the instance."""
        try:
            await instance_groups.remove(self._api, self._config, pool, [name])
        except GceError as failure:
            if failure.kind != "bad_request":
                raise
            return False  # No longer a member of the group.
        return True

    # ---- prices and quotas ----------------------------------------------------------------------

    async def prices(self) -> Mapping[Pool, float]:
        """Return dollars an hour per instance of each pool."""
        rates, own = await self._billing.rates(), self._config.group_prices
        return prices_of(self.pools, self._catalogue, rates, own)

    async def quotas(self) -> Sequence[QuotaUsage]:
        """Return the GPU quotas of every region and of the project."""
        try:
            by_region = await limits_by_region(self._api, self._config.regions)
            project = await self._api.call("Projects", "get")
        except GceError as failure:
            raise ProviderError(failure.text) from failure
        families = FamilyLimits()
        if needs_families(self.pools, by_region):
            families = await self._families.limits()
        limits, rented = read_limits(project.quotas), self._seen.values()
        return quotas_of(self.pools, by_region, limits, families, rented)

    async def close(self) -> None:
        """Stop the threads."""
        self._api.close()


def open_gce(
    config: GceConfig, catalogue: Catalogue, now: Callable[[], float] = time.time
) -> GceProvider:
    """Find credentials and open the provider; blocks, and raises ``InputError`` without any.

    ``now``: the clock of the caller, which compares the times of observations with its own.
    """
    credentials = find_credentials(config.credentials, config.endpoint)
    return GceProvider(config, catalogue, GceClient(credentials, config), now)


def _is_old(page: Any, before: float) -> bool:
    # Sorted by time, latest first.
    operations = [one for scope in page.items.values() for one in scope.operations]
    return any(one.insert_time and parse_time(one.insert_time) < before for one in operations)
