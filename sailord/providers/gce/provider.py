"""Google Cloud as a provider of machines.

Nothing here decides. A request is sent once; what cannot be told of it is ``InDoubt``, and only a
later look says what became of it. Names follow from the request, so that even a request that is
repeated after Google forgot it cannot make a machine twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from sailord.providers.gce import instance_groups, preflight
from sailord.providers.gce.billing import Billing
from sailord.providers.gce.client import Api, find_credentials
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.errors import Failure, failure_of
from sailord.providers.gce.observe import HISTORY_S, instance_of, moment_of, past_of, scopes_of
from sailord.providers.gce.prices import prices_of
from sailord.providers.gce.quotas import limits_of, quotas_of
from sailord.providers.gce.requests import CLUSTER_LABEL, bulk_insert_of, names_of, request_uuid
from sailord.providers.interface import (
    Ask,
    Deleted,
    Granted,
    InDoubt,
    Instance,
    Notice,
    Observation,
    Outcome,
    Pool,
    ProviderError,
    Quota,
    Refused,
)
from simulator.documents.problems import Problem
from simulator.hardware.catalogue import Catalogue

NOT_FOUND, CONFLICT = 404, 409


class _UnsettledError(Exception):
    """An operation did not end in time."""


class Gce:
    """One project, as far as it carries one cluster's label."""

    def __init__(
        self,
        config: GceConfig,
        catalogue: Catalogue,
        api: Api,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._catalogue = catalogue
        self._api = api
        self._now = now
        self._billing = Billing(api, config)
        self._requests: dict[str, str] = {}
        """Our request ids by those that Google knows, where they differ."""
        self._seen: dict[str, Instance] = {}
        """By number, as last seen: a deletion needs to know where a machine is."""

    @property
    def pools(self) -> Sequence[Pool]:
        """Every zone with every machine under every contract that the file names."""
        return self._config.pools

    async def check(self) -> Sequence[Problem]:
        """Raise an ``InputError`` that tells all a person has to put right."""
        await preflight.check(self._api, self._config)
        trouble = await self._billing.read()
        return () if trouble is None else (trouble,)

    # ---- looking --------------------------------------------------------------------------------

    async def observe(self) -> Observation:
        """Look at all machines with our label, and at what happened to them."""
        at = self._now()
        rule = f'labels.{CLUSTER_LABEL}="{self._config.cluster_name}"'
        try:
            pages, operations = await asyncio.gather(
                self._list("Instances", filter=rule),
                self._api.pages(
                    *("GlobalOperations", "aggregated_list"),
                    project=self._config.project,
                    max_results=500,
                    order_by="creationTimestamp desc",
                    is_enough=lambda page: _is_old(page, at - HISTORY_S),
                ),
            )
        except Failure as failure:
            raise ProviderError(failure.text) from failure
        resources, unseen = scopes_of(pages, "instances")
        found = tuple(self._instance(one) for one in resources)
        self._seen = {
            **{i.id: i for i in self._seen.values() if i.pool.zone in unseen},
            **{i.id: i for i in found},
        }
        past = past_of(scopes_of(operations, "operations")[0], at)
        return Observation(
            at=at,
            instances=found,
            unseen_zones=unseen,
            preemptions=past.preemptions,
            pending_requests=frozenset(
                self._requests.get(one, one) for one in past.pending_requests
            ),
            ended_at=past.ended_at,
        )

    async def _list(self, client: str, **fields: Any) -> list[Any]:
        project = self._config.project
        return await self._api.pages(client, "aggregated_list", project=project, **fields)

    def _instance(self, resource: Any) -> Instance:
        return instance_of(resource, self._requests, self._catalogue)

    # ---- making ---------------------------------------------------------------------------------

    async def create(self, ask: Ask) -> Outcome:
        """Make machines, as many of them as can be had, and wait for Google's word on it."""
        assert ask.count > 0, "nothing was asked for"
        config = self._config
        self._requests[request_uuid(ask.request_id)] = ask.request_id
        grouped = ask.pool in config.groups
        try:
            operation = await (
                instance_groups.order(self._api, config, ask) if grouped else self._order(ask)
            )
        except Failure as failure:
            if failure.is_transient:
                return InDoubt(ask.request_id, failure.text)
            # A name that is taken is ours: this request came through before.
            is_repeated = failure.status == CONFLICT or "already exists" in failure.text
            return await self._outcome(ask, failure) if is_repeated else self._refused(ask, failure)
        try:
            refusal = await self._settle(ask.pool.zone, operation)
            if grouped and refusal is None:
                refusal = await instance_groups.wait_made(self._api, config, ask)
        except (Failure, _UnsettledError) as error:
            return InDoubt(ask.request_id, str(error))
        return await self._outcome(ask, refusal)

    async def _order(self, ask: Ask) -> Any:
        return await self._api.call(
            *("Instances", "bulk_insert_unary"),
            project=self._config.project,
            zone=ask.pool.zone,
            request_id=request_uuid(ask.request_id),
            bulk_insert_instance_resource_resource=bulk_insert_of(ask, self._config),
        )

    async def _settle(self, zone: str, operation: Any) -> Failure | None:
        """Wait until an operation ends; return what its errors say."""
        loop = asyncio.get_running_loop()
        deadline, name, trouble = loop.time() + self._config.operation_s, operation.name, ""
        while operation.status.name != "DONE":
            if loop.time() > deadline:
                told = f"operation {name} has not ended after {self._config.operation_s:.0f} s"
                raise _UnsettledError(f"{told}{f' ({trouble})' if trouble else ''}")
            await asyncio.sleep(self._config.poll_s)
            try:
                operation = await self._api.call(
                    *("ZoneOperations", "get"),
                    project=self._config.project,
                    zone=zone,
                    operation=name,
                )
            except Failure as failure:
                # It goes on whether or not it can be watched.
                trouble = failure.text
        errors = [(error.code, error.message) for error in operation.error.errors]
        status = operation.http_error_status_code
        return failure_of(status, errors, message=operation.http_error_message) if errors else None

    async def _outcome(self, ask: Ask, refusal: Failure | None) -> Outcome:
        """Say what was made, by looking at it."""
        names = set(names_of(ask, self._config.cluster_name))
        try:
            pages = await self._api.pages(
                *("Instances", "list"),
                project=self._config.project,
                zone=ask.pool.zone,
                filter=f'labels.{CLUSTER_LABEL}="{self._config.cluster_name}"',
            )
        except Failure as failure:
            return InDoubt(ask.request_id, failure.text)
        found = [one for page in pages for one in page.items if one.name in names]
        made = tuple(self._instance(one) for one in found)
        self._seen |= {instance.id: instance for instance in made}
        if refusal is not None and not made:
            return self._refused(ask, refusal)
        return Granted(ask.request_id, made)

    def _refused(self, ask: Ask, failure: Failure) -> Refused:
        cure = preflight.cure_of(failure, self._config.project)
        text = f"{failure.text}; {cure}" if cure else failure.text
        return Refused(ask.request_id, failure.kind, text, failure.retry_after_s)

    # ---- removing -------------------------------------------------------------------------------

    async def delete(self, ids: Sequence[str]) -> Deleted:
        """Order machines to be deleted, by their numbers, and their disks with them."""
        wanted = tuple(dict.fromkeys(ids))
        failed: dict[str, str] = {}
        if any(one not in self._seen for one in wanted):
            try:
                look = await self.observe()
            except ProviderError as error:
                return Deleted((), dict.fromkeys(wanted, str(error)))
            if look.unseen_zones:
                text = f"nothing is known of {', '.join(look.unseen_zones)}"
                failed = {one: text for one in wanted if one not in self._seen}
        known = [one for one in wanted if one in self._seen]
        answers = await asyncio.gather(*(self._delete(self._seen[one]) for one in known))
        failed |= {one: why for one, why in zip(known, answers, strict=True) if why is not None}
        return Deleted(tuple(one for one in wanted if one not in failed), failed)

    async def _delete(self, instance: Instance) -> str | None:
        """Order one deletion; return why it was not taken."""
        # The number, as another machine may bear the name by now.
        one = {
            "project": self._config.project,
            "zone": instance.pool.zone,
            "instance": instance.id,
        }
        try:
            if instance.pool in self._config.groups:
                found = await self._api.call("Instances", "get", **one)
                if await self._is_removed(instance.pool, found.name):
                    return None
            await self._api.call("Instances", "delete_unary", **one)
        except Failure as failure:
            return None if failure.status == NOT_FOUND else failure.text
        return None

    async def _is_removed(self, pool: Pool, name: str) -> bool:
        """Have its group delete a machine, as it would replace one that was only deleted."""
        config, link = self._config, f"zones/{pool.zone}/instances/{name}"
        try:
            await instance_groups.remove_links(
                self._api, config, pool.zone, config.groups[pool], [link]
            )
        except Failure as failure:
            if failure.kind != "bad_request":
                raise
            return False  # It belongs to the group no more.
        return True

    # ---- what may be had ------------------------------------------------------------------------

    async def prices(self) -> Mapping[Pool, float]:
        """Dollars an hour for one machine of each pool."""
        return prices_of(self.pools, self._catalogue, await self._billing.rates())

    async def quotas(self) -> Sequence[Quota]:
        """The limits on GPUs, of every region and of the whole project."""
        try:
            by_region = await preflight.limits_by_region(
                self._api, self._config, self._config.regions
            )
            project = await self._api.call("Projects", "get", project=self._config.project)
        except Failure as failure:
            raise ProviderError(failure.text) from failure
        return quotas_of(self.pools, by_region, limits_of(project.quotas))

    async def notices(self) -> AsyncIterator[Notice]:
        """None: agents hear them from the metadata server, sooner than anybody here could."""
        nothing: tuple[Notice, ...] = ()
        for notice in nothing:
            yield notice

    async def close(self) -> None:
        """Let go of the threads."""
        self._api.close()


def open_gce(config: GceConfig, catalogue: Catalogue) -> Gce:
    """Find credentials; ``InputError`` says how to come by some. It blocks for a while."""
    credentials = find_credentials(config.credentials, config.endpoint)
    return Gce(config, catalogue, Api(credentials, config.endpoint, config.call_s))


def _is_old(page: Any, before: float) -> bool:
    # The latest come first.
    operations = [one for scope in page.items.values() for one in scope.operations]
    return any(one.insert_time and moment_of(one.insert_time) < before for one in operations)
