"""Requests that wait in Google's queue, with the real client library."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from click.testing import CliRunner

from sailord.main import main
from sailord.providers.gce.requests import startup_script
from sailord.providers.interface import InDoubt, Pool, Queued, Refused
from simulator.documents.problems import InputError
from tests.fakes.gce.cloud import Cloud, Group, InjectedFailure
from tests.fakes.gce.resize_requests import grant, refuse
from tests.gce.cloud import HERE, ask, config, provider
from tests.processes import until

FLEX = Pool(HERE, "a2-highgpu-1g", "A100-40", 1, spot=False, flex=True)
PROPERTIES = {
    "machineType": "a2-highgpu-1g",
    "labels": {"sailor-cluster": "prod"},
    "scheduling": {"provisioningModel": "FLEX_START", "instanceTerminationAction": "DELETE"},
    "metadata": {
        "items": [
            {
                "key": "startup-script",
                "value": startup_script(FLEX, config("http://127.0.0.1")),
            }
        ]
    },
}
DAY_S = 86_400


def queued(story, **changes: Any) -> Cloud:
    """Play a story with a provider whose only pool is that of a group with a queue."""
    cloud = Cloud(groups={"flex": Group("flex", HERE, PROPERTIES)}, **changes)
    with provider(cloud, FLEX, groups={FLEX: "flex"}, max_run_s=30 * DAY_S) as gce:
        asyncio.run(story(cloud, gce, cloud.groups["flex"]))
    return cloud


def test_a_request_waits_and_is_granted_as_a_whole_for_seven_days_at_most():
    async def story(cloud, gce, group):
        first = ask(2, of=FLEX)
        assert await gce.create(first) == Queued(first.request_id)
        assert await gce.create(first) == Queued(first.request_id), "the same one"
        seen = await gce.observe()
        assert (seen.queued, seen.instances) == ({first.request_id: first}, ())
        ((name, waiting),) = group.queue.items()
        grant(cloud, group, name)
        await until(lambda: all(vm.status == "RUNNING" for vm in cloud.there()))
        seen = await gce.observe()
        assert (seen.queued, seen.refused) == ({}, ())
        assert {one.request_id for one in seen.instances} == {first.request_id}
        assert {one.pool for one in seen.instances} == {FLEX}
        assert {one.ends_at - one.created_at for one in seen.instances} == {7 * DAY_S}
        assert waiting.run_s == 7 * DAY_S
        assert [list(config) for config in waiting.configs] == [["name"]] * 2
        assert len((await gce.delete([one.id for one in seen.instances])).ids) == 2
        await until(lambda: not cloud.there())
        assert group.wanted == {}, "the group makes no others"

    cloud = queued(story)
    assert not any("bulkInsert" in line or "createInstances" in line for line in cloud.asked)


def test_instances_end_at_the_end_of_their_time():
    late_s = [0.0]

    async def story(cloud, gce, group):
        await gce.create(ask(1, of=FLEX))
        grant(cloud, group, next(iter(group.queue)))
        await until(lambda: all(vm.status == "RUNNING" for vm in cloud.there()))
        (one,) = (await gce.observe()).instances
        late_s[0] = 7 * DAY_S + 1.0
        await until(lambda: not cloud.there())
        seen = await gce.observe()
        assert (seen.instances, group.wanted) == ((), {})
        assert seen.ended_at[one.id] >= one.ends_at

    queued(story, clock=lambda: time.time() + late_s[0])


def test_a_request_is_withdrawn_once_and_for_all():
    async def story(cloud, gce, group):
        first, second = ask(1, of=FLEX), ask(1, of=FLEX, number=1)
        await gce.create(first)
        assert await gce.cancel(first) == ""
        seen = await gce.observe()
        assert (seen.queued, [each.request_id for each in seen.refused]) == (
            {},
            [first.request_id],
        )
        assert await gce.cancel(second) == "", "it was never there"
        await gce.create(second)
        grant(cloud, group, list(group.queue)[-1])
        assert "does not wait" in await gce.cancel(second)

    queued(story)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("ZONE_RESOURCE_POOL_EXHAUSTED", "stockout"), ("QUOTA_EXCEEDED", "quota"), ("ODD", "unknown")],
)
def test_a_request_that_google_ends_is_a_refusal_with_its_cause(code, kind):
    async def story(cloud, gce, group):
        first = ask(1, of=FLEX)
        await gce.create(first)
        refuse(cloud, group, next(iter(group.queue)), code, "as told")
        (refused,) = (await gce.observe()).refused
        assert refused == Refused(first.request_id, kind, f"{code}: as told")

    queued(story)


def test_a_lost_answer_is_in_doubt_and_the_queue_shows_it():
    async def story(cloud, gce, _):
        first = ask(1, of=FLEX)
        cloud.failures = [InjectedFailure("POST .*/resizeRequests", 1, status=503, is_done=True)]
        assert isinstance(await gce.create(first), InDoubt)
        assert (await gce.observe()).queued == {first.request_id: first}
        cloud.failures = [InjectedFailure("GET .*/resizeRequests", 1, status=503)]
        seen = await gce.observe()
        assert (seen.queued, seen.unseen_queues, seen.unseen_zones) == ({}, (HERE,), ())

    queued(story)


def test_a_refused_insertion_names_the_cure():
    async def story(_, gce, __):
        refused = await gce.create(ask(1, of=FLEX))
        assert refused.kind == "permission"
        assert "--add-permissions=compute.instanceGroupManagers.update" in refused.text

    queued(story, denied={"compute.instanceGroupManagers.update"})


def test_instances_are_known_by_their_names_also_while_the_queue_is_not_seen():
    async def story(cloud, gce, group):
        first = ask(1, of=FLEX)
        await gce.create(first)
        grant(cloud, group, next(iter(group.queue)))
        assert {one.request_id for one in (await gce.observe()).instances} == {first.request_id}
        cloud.failures = [InjectedFailure("GET .*/resizeRequests", 1, status=503)]
        seen = await gce.observe()
        assert {one.request_id for one in seen.instances} == {first.request_id}
        cloud.insert(HERE, {**PROPERTIES, "name": "by-hand"})
        by_hand = [one for one in (await gce.observe()).instances if one.name == "by-hand"]
        assert [one.request_id for one in by_hand] == [""], "no request of sailord made it"

    queued(story)


def test_where_the_group_is_gone_nothing_waits_and_the_log_says_so_once():
    async def story(cloud, gce, _):
        first = ask(1, of=FLEX)
        await gce.create(first)
        del cloud.groups["flex"]
        with structlog.testing.capture_logs() as told:
            for _ in range(2):
                seen = await gce.observe()
                assert (seen.queued, seen.unseen_queues, seen.unseen_zones) == ({}, (), ())
        assert ["flex" in line["event"] for line in told] == [True]
        assert await gce.cancel(first) == ""

    queued(story)


def test_a_queue_that_may_not_be_read_hides_no_instances():
    async def story(cloud, gce, _):
        cloud.denied = {"compute.instanceGroupManagers.get"}
        seen = await gce.observe()
        assert (seen.unseen_queues, seen.unseen_zones) == ((HERE,), ())

    queued(story)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"labels": {"sailor-cluster": "other"}}, "--labels=sailor-cluster=prod"),
        ({"scheduling": {"provisioningModel": "SPOT"}}, "--provisioning-model=FLEX_START"),
        ({"machineType": "a2-highgpu-2g"}, "--machine-type=a2-highgpu-1g"),
        ({"metadata": {}}, "sailord startup-script a2-highgpu-1g"),
    ],
)
def test_a_template_that_does_not_fit_is_a_mistake(change, word):
    async def story(_, gce, group):
        assert not [one for one in await gce.check() if one.place == "provider.group"]
        group.properties = {**PROPERTIES, **change}
        with pytest.raises(InputError) as caught:
            await gce.check()
        (problem,) = (one for one in caught.value.problems if one.place == "provider.group")
        assert word in problem.cure

    queued(story)


def test_a_template_with_an_old_script_is_a_warning():
    async def story(_, gce, group):
        script = {"key": "startup-script", "value": "#!/bin/sh"}
        group.properties = {**PROPERTIES, "metadata": {"items": [script]}}
        (problem,) = (one for one in await gce.check() if one.place == "provider.group")
        assert "has another start-up script" in problem.what

    queued(story)


def test_the_script_for_a_template_is_printed(monkeypatch):
    found = config("http://127.0.0.1", FLEX)
    loaded = SimpleNamespace(provider=found)
    monkeypatch.setattr("sailord.config.load_config", lambda *_, **__: loaded)
    done = CliRunner().invoke(main, ["startup-script", FLEX.machine])
    assert (done.exit_code, done.output.strip()) == (0, startup_script(FLEX, found).strip())
    done = CliRunner().invoke(main, ["startup-script", "a2-highgpu-2g"])
    assert (done.exit_code, "flex_start = true" in done.output) == (2, True)
