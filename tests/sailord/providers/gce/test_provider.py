"""The provider and the fake cloud, with the real client library between them."""

from __future__ import annotations

import asyncio
import re

import pytest
from structlog.testing import capture_logs

from sailord.providers.interface import Granted, InDoubt, ProviderError, Refused
from tests.fakes.gce.answers import sku
from tests.fakes.gce.cloud import STOCKOUT, Cloud, Hooks, InjectedFailure
from tests.fakes.gce.rest import Rest
from tests.gce.cloud import HERE, THERE, ask, pool, provider
from tests.processes import until

BULK = r"POST .*/bulkInsert"

MILLISECOND_S = 0.0011
"""The API tells times in whole milliseconds."""


def test_instances_are_created_observed_and_deleted():
    async def story(cloud, gce):
        granted = await gce.create(ask(3))
        assert isinstance(granted, Granted)
        assert len({one.id for one in granted.instances}) == 3
        await until(lambda: all(vm.status == "RUNNING" for vm in cloud.there()))
        look = await gce.observe()
        assert {one.id for one in look.instances} == {one.id for one in granted.instances}
        for one in look.instances:
            assert one.state == "running"
            assert one.pool == pool()
            assert one.request_id == ask(3).request_id
            assert one.node == one.name
            made = next(v.created_at for v in cloud.vms if str(v.id) == one.id)
            assert one.created_at == pytest.approx(made, abs=MILLISECOND_S, rel=0)
        first, *rest = (one.id for one in look.instances)
        deleted = await gce.delete([first, "17"])
        assert deleted.ids == (first, "17"), "what is not there is deleted"
        assert not deleted.failed
        await until(lambda: len(cloud.there()) == 2)
        look = await gce.observe()
        assert {one.id for one in look.instances} == set(rest)
        ended = next(v.ended_at for v in cloud.vms if str(v.id) == first)
        assert look.ended_at[first] == pytest.approx(ended, abs=MILLISECOND_S, rel=0)
        await gce.delete(rest)
        await until(lambda: not cloud.there() and not cloud.running_operations())

    cloud = Cloud()
    with provider(cloud) as gce:
        asyncio.run(story(cloud, gce))


def test_a_request_matches_the_configuration():
    cloud = Cloud()
    with provider(cloud, network="lab", placement={"us-central1": "near"}) as gce:
        asyncio.run(gce.create(ask(1)))
        asyncio.run(gce.create(ask(1, of=pool(spot=False), number=1)))
    spot, usual = cloud.vms
    assert spot.body["scheduling"] == {
        "provisioningModel": "SPOT",
        "instanceTerminationAction": "DELETE",
        "maxRunDuration": {"seconds": "604800"},
        "preemptionNoticeDuration": {"seconds": "120"},
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
    }
    assert usual.body["scheduling"]["provisioningModel"] == "STANDARD"
    assert usual.body["scheduling"]["maxRunDuration"] == {"seconds": "604800"}
    assert usual.body["scheduling"]["instanceTerminationAction"] == "DELETE"
    (disk,) = spot.body["disks"]
    assert disk["autoDelete"] is True
    assert disk["initializeParams"]["labels"]["sailor-cluster"] == "prod"
    assert spot.body["networkInterfaces"][0]["network"] == "global/networks/lab"
    assert spot.body["resourcePolicies"] == ["near"]
    script = spot.metadata["startup-script"]
    assert "package='sailor[worker]==0.1.0'" in script
    assert 'machine = "a2-highgpu-1g"' in script
    assert not re.search("@[A-Z_]+@", script), "every place is filled in"


def test_a_repeated_request_creates_nothing():
    cloud = Cloud()
    with provider(cloud) as gce:
        first = asyncio.run(gce.create(ask(2)))
        again = asyncio.run(gce.create(ask(2)))
        assert {one.id for one in first.instances} == {one.id for one in again.instances}
        # Google forgets a request after an hour; its names are still taken.
        cloud._seen.clear()
        late = asyncio.run(gce.create(ask(2)))
        assert {one.id for one in late.instances} == {one.id for one in first.instances}
    assert len(cloud.vms) == 2


def test_a_lost_answer_leaves_the_request_in_doubt():
    cloud = Cloud(failures=[InjectedFailure(BULK, 1, status=503, is_done=True)])
    with provider(cloud) as gce:
        assert isinstance(asyncio.run(gce.create(ask(2))), InDoubt)
        look = asyncio.run(gce.observe())
    assert [one.request_id for one in look.instances] == [ask(2).request_id] * 2
    assert sum("bulkInsert" in line for line in cloud.asked) == 1, "it was sent again"


def test_an_operation_that_never_ends_is_in_doubt_and_pending():
    cloud = Cloud(hung=1)
    with provider(cloud, operation_s=0.2) as gce:
        outcome = asyncio.run(gce.create(ask(1)))
        assert isinstance(outcome, InDoubt)
        assert "did not end within" in outcome.text
        look = asyncio.run(gce.observe())
    assert look.pending_requests == {ask(1).request_id}


def test_a_request_id_that_is_no_uuid_is_restored():
    cloud = Cloud(hung=1)
    with provider(cloud, operation_s=0.1) as gce:
        asyncio.run(gce.create(ask(1, request_id="third try")))
        look = asyncio.run(gce.observe())
    assert look.pending_requests == {"third try"}
    assert [one.request_id for one in look.instances] == ["third try"]


@pytest.mark.parametrize(
    ("behave", "kind", "words"),
    [
        ({"stock": {(HERE, "a2-highgpu-1g", True): 0}}, "stockout", "enough resources"),
        ({"quotas": {("us-central1", "NVIDIA_A100_GPUS"): 1}}, "quota", "NVIDIA_A100_GPUS"),
        ({"denied": {"compute.instances.create"}}, "permission", "compute.instances.create"),
        ({"is_expired": True}, "permission", "credentials"),
        ({"not_offered": {(HERE, "a2-highgpu-1g")}}, "bad_request", "does not exist in zone"),
        (
            {
                "failures": [
                    InjectedFailure(BULK, 1, 403, "rateLimitExceeded", "Rate", retry_after_s=7)
                ]
            },
            "rate",
            "rateLimitExceeded",
        ),
        (
            {
                "failures": [
                    InjectedFailure(BULK, 1, 403, "quotaExceeded", "Quota 'CPUS' exceeded.")
                ]
            },
            "quota",
            "CPUS",
        ),
        (
            {"failures": [InjectedFailure(BULK, 1, 503, STOCKOUT, "none left")]},
            "stockout",
            "none left",
        ),
        (
            {"failures": [InjectedFailure(BULK, 1, 418, "FLUX_LOW", "odd")]},
            "unknown",
            "FLUX_LOW: odd",
        ),
        (
            {"failures": [InjectedFailure(BULK, 1, 403, "FLUX_LOW", "odd")]},
            "unknown",
            "FLUX_LOW: odd",
        ),
        (
            {"failures": [InjectedFailure(BULK, 1, 400, "resourceNotReady", "wait")]},
            "unknown",
            "NotReady: wait",
        ),
    ],
)
def test_every_refusal_is_classified(behave, kind, words):
    cloud = Cloud(**behave)
    taken = ask(2) if kind == "quota" else ask(1)
    if "quotas" in behave:
        cloud.quotas[("us-central1", "NVIDIA_A100_GPUS")] = 0
    with provider(cloud) as gce:
        outcome = asyncio.run(gce.create(taken))
    assert isinstance(outcome, Refused)
    assert (outcome.kind, words in outcome.text) == (kind, True), outcome.text
    assert outcome.retry_after_s == (7 if kind == "rate" else None)
    assert cloud.vms == []


def test_a_request_may_be_granted_in_part():
    cloud = Cloud(stock={(HERE, "a2-highgpu-1g", True): 2})
    with provider(cloud) as gce:
        outcome = asyncio.run(gce.create(ask(4)))
    assert len(outcome.instances) == 2
    assert len(cloud.vms) == 2


@pytest.mark.parametrize("warns", [True, False])
def test_all_pages_are_read_and_silent_zones_are_named(warns):
    cloud = Cloud(page=2, warns=warns)
    with provider(cloud) as gce:
        asyncio.run(gce.create(ask(5)))
        asyncio.run(gce.create(ask(3, of=pool(THERE), number=1)))
        whole = asyncio.run(gce.observe())
        assert len(whole.instances) == 8
        assert whole.unseen_zones == ()
        cloud.unreachable.add(THERE)
        part = asyncio.run(gce.observe())
        assert len(part.instances) == 5
        assert part.unseen_zones == (THERE,)
        gone = next(one.id for one in whole.instances if one.pool.zone == THERE)
        assert asyncio.run(gce.delete([gone])).ids == (gone,), "it is known from before"


def test_instances_without_our_label_are_ignored():
    cloud = Cloud()
    with provider(cloud, cluster_name="other") as gce:
        asyncio.run(gce.create(ask(1)))
    with provider(cloud) as gce:
        assert asyncio.run(gce.observe()).instances == ()


class Diary(Hooks):
    """What the fake does to its machines, written down."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def booted(self, vm):
        self.lines.append(f"booted {'with' if vm.has_gpu else 'without'} its GPU")

    def warned(self, vm, seconds):
        assert vm.is_there
        self.lines.append(f"warned {seconds:g}")

    def ended(self, vm):
        assert vm.is_there
        self.lines.append("ended")


def test_a_preempted_instance_is_reported_and_deleted():
    async def story(cloud, gce):
        (one,) = (await gce.create(ask(1))).instances
        await until(lambda: cloud.vms[0].status == "RUNNING")
        cloud.preempt(one.name, notice_s=0.05)
        await until(lambda: not cloud.there())
        look = await gce.observe()
        assert look.instances == ()
        assert [p.instance for p in look.preemptions] == [one.id]
        ended = cloud.vms[0].ended_at
        assert look.ended_at[one.id] == pytest.approx(ended, abs=MILLISECOND_S, rel=0)
        # The name may come back; its number does not, and the old one is deleted already.
        cloud._seen.clear()
        (other,) = (await gce.create(ask(1))).instances
        assert (other.name, other.id != one.id) == (one.name, True)
        assert (await gce.delete([one.id])).ids == (one.id,)
        assert len(cloud.there()) == 1, "a deletion means a number, never a name"

    diary = Diary()
    cloud = Cloud(hooks=diary)
    with provider(cloud) as gce:
        asyncio.run(story(cloud, gce))
    assert diary.lines[:3] == ["booted with its GPU", "warned 0.05", "ended"]


def test_an_instance_that_went_off_by_itself_costs_nothing_from_then_on():
    async def story(cloud, gce):
        (one,) = (await gce.create(ask(1))).instances
        await until(lambda: cloud.vms[0].status == "RUNNING")
        assert (await gce.observe()).ended_at == {}
        with cloud.lock:  # As its agent does without a leader; sailord returns much later.
            cloud.vms[0].status, cloud.vms[0].off_at = "TERMINATED", cloud.now()
        look = await gce.observe()
        assert [each.state for each in look.instances] == ["preempted"]
        went = cloud.vms[0].off_at
        assert look.ended_at == {one.id: pytest.approx(went, abs=MILLISECOND_S, rel=0)}

    cloud = Cloud()
    with provider(cloud) as gce:
        asyncio.run(story(cloud, gce))


def test_a_deletion_is_by_number():
    async def story(cloud, gce):
        (old,) = (await gce.create(ask(1))).instances
        await until(lambda: cloud.vms[0].status == "RUNNING")
        cloud.preempt(old.name, notice_s=0)
        await until(lambda: not cloud.there())
        cloud._seen.clear()
        (new,) = (await gce.create(ask(1))).instances
        assert (new.name, new.id != old.id) == (old.name, True)
        assert (await gce.delete([old.id])).ids == (old.id,)
        assert [vm.status == "STOPPING" for vm in cloud.there()] == [False]

    cloud = Cloud()
    with provider(cloud) as gce:
        asyncio.run(story(cloud, gce))


def test_a_deletion_during_an_observation_succeeds():
    async def story(cloud, gce):
        granted = (await gce.create(ask(2))).instances
        await until(lambda: all(vm.status == "RUNNING" for vm in cloud.there()))
        cloud.failures.append(InjectedFailure("DELETE", 2, delay_s=1.0))
        deleting = asyncio.create_task(gce.delete([one.id for one in granted]))
        await asyncio.sleep(0)
        cloud.preempt(granted[0].name, notice_s=0)
        await until(lambda: len(cloud.there()) == 1)
        assert len((await gce.observe()).instances) == 1
        deleted = await deleting
        assert deleted.ids == tuple(one.id for one in granted)

    cloud = Cloud()
    with provider(cloud) as gce:
        asyncio.run(story(cloud, gce))


def test_instances_that_do_not_boot_or_lack_a_gpu_are_observed():
    diary = Diary()
    cloud = Cloud(hooks=diary, dead=1, blind=2)
    with provider(cloud) as gce:
        asyncio.run(gce.create(ask(3)))
        asyncio.run(until(lambda: all(vm.status == "RUNNING" for vm in cloud.there())))
    assert sorted(diary.lines) == ["booted with its GPU", "booted without its GPU"]


def test_answers_503_leave_instances_unknown():
    cloud = Cloud()
    with provider(cloud) as gce:
        (one,) = asyncio.run(gce.create(ask(1))).instances
        cloud.failures.append(InjectedFailure(".*", 1000, status=503))
        with pytest.raises(ProviderError):
            asyncio.run(gce.observe())
        assert asyncio.run(gce.delete([one.id])).failed
        cloud.failures.clear()
        assert len(asyncio.run(gce.observe()).instances) == 1


@pytest.mark.slow
def test_a_call_times_out():
    cloud = Cloud(failures=[InjectedFailure("aggregated/instances", 1, delay_s=3.0)])
    with provider(cloud, call_s=0.5) as gce, pytest.raises(ProviderError, match="timed out"):
        asyncio.run(gce.observe())


def test_a_call_does_not_block_the_event_loop():
    async def story(gce):
        looking = asyncio.create_task(gce.observe())
        turns = 0
        while not looking.done():
            turns += 1
            await asyncio.sleep(0.01)
        await looking
        return turns

    cloud = Cloud(failures=[InjectedFailure("aggregated/instances", 1, delay_s=0.5)])
    with provider(cloud) as gce:
        assert asyncio.run(story(gce)) > 10


def test_quotas_are_read_per_region_and_for_the_project():
    quotas = {
        ("us-central1", "NVIDIA_A100_GPUS"): 16,
        ("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS"): 4,
        ("us-east1", "NVIDIA_A100_GPUS"): 8,
        ("us-east1", "PREEMPTIBLE_NVIDIA_A100_GPUS"): 0,
        ("global", "GPUS_ALL_REGIONS"): 6,
    }
    east = pool("us-east1-b")
    cloud = Cloud(quotas=quotas)
    with provider(cloud, pool(), pool(THERE), pool(spot=False), east) as gce:
        asyncio.run(gce.create(ask(3)))
        asyncio.run(gce.create(ask(1, of=pool(spot=False), number=1)))
        told = {quota.name: quota for quota in asyncio.run(gce.quotas())}
    assert {name: quota.pools for name, quota in told.items()} == {
        "PREEMPTIBLE_NVIDIA_A100_GPUS in us-central1": (pool(), pool(THERE)),
        "NVIDIA_A100_GPUS in us-central1": (pool(spot=False),),
        # The preemptible quota there is 0, so Spot machines draw on the usual one.
        "NVIDIA_A100_GPUS in us-east1": (east,),
        "GPUS_ALL_REGIONS of the project": (pool(spot=False),),
    }
    assert told["PREEMPTIBLE_NVIDIA_A100_GPUS in us-central1"].free_gpus == 1
    assert told["NVIDIA_A100_GPUS in us-central1"].free_gpus == 15
    assert told["GPUS_ALL_REGIONS of the project"].free_gpus == 5


def test_a_lowered_quota_is_read():
    key = ("us-central1", "NVIDIA_A100_GPUS")
    cloud = Cloud(quotas={key: 4})
    with provider(cloud, pool()) as gce:
        assert len(asyncio.run(gce.create(ask(2))).instances) == 2
        cloud.quotas[key] = 1
        (quota,) = asyncio.run(gce.quotas())
        assert (quota.limit_gpus, quota.used_gpus, quota.free_gpus) == (1, 2, 0)
        assert asyncio.run(gce.create(ask(1, number=1))).kind == "quota"
        assert len(asyncio.run(gce.observe()).instances) == 2, "what runs, runs on"


@pytest.mark.slow
def test_old_operations_are_not_reported():
    async def story(cloud, gce):
        (one,) = (await gce.create(ask(1))).instances
        await until(lambda: cloud.vms[0].status == "RUNNING")
        cloud.preempt(one.name, notice_s=0)
        await until(lambda: not cloud.there())
        for operation in cloud.operations.values():
            operation.inserted_at -= 4000
            operation.ended_at -= 4000
        look = await gce.observe()
        assert (look.preemptions, look.ended_at) == ((), {})

    cloud = Cloud()
    with provider(cloud) as gce:
        asyncio.run(story(cloud, gce))


def test_billing_catalogue_prices_take_precedence():
    cloud = Cloud()
    rest = Rest(cloud)
    rest.skus = [
        sku(
            "Nvidia Tesla A100 GPU attached to Spot Preemptible VMs",
            "GPU",
            "us-central1",
            1.0,
            spot=True,
        ),
        sku("Nvidia Tesla A100 80GB GPU attached to Spot", "GPU", "us-central1", 9.0, spot=True),
        sku(
            "Spot Preemptible A2 Instance Core running in Iowa",
            "CPU",
            "us-central1",
            0.01,
            spot=True,
        ),
        sku(
            "Spot Preemptible A2 Instance Ram running in Iowa",
            "RAM",
            "us-central1",
            0.002,
            spot=True,
        ),
        sku("Commitment v1: A2 Core", "CPU", "us-central1", 0.001),
    ]
    with provider(cloud, billing=True, rest=rest) as gce:
        prices = asyncio.run(gce.prices())
        with_list = asyncio.run(gce.prices())
    with provider(cloud) as gce:
        built_in = asyncio.run(gce.prices())
    assert prices == with_list
    assert prices[pool()] == pytest.approx(1.0 + 12 * 0.01 + 85 * 0.002)
    assert prices[pool(spot=False)] == built_in[pool(spot=False)] != prices[pool()]


def lines_of(act) -> list[str]:
    """What is logged meanwhile."""
    with capture_logs() as lines:
        act()
    return [f"{line['event']} {line.get('error', '')}" for line in lines]


@pytest.mark.parametrize(
    ("behave", "cure"),
    [
        (
            {"denied": {"billing"}},
            "gcloud services enable cloudbilling.googleapis.com --project=test-project",
        ),
        ({"is_expired": True}, "gcloud auth application-default login"),
        ({"failures": [InjectedFailure("/skus", 10, 503)]}, "retried every"),
    ],
)
def test_without_the_billing_catalogue_built_in_prices_are_used(behave, cure):
    with provider(Cloud()) as gce:
        built_in = asyncio.run(gce.prices())
    with provider(Cloud(**behave), billing=True) as gce:
        (line,) = lines_of(lambda: asyncio.run(gce.prices()))
        assert cure in line
        assert asyncio.run(gce.prices()) == built_in != {}
        assert lines_of(lambda: asyncio.run(gce.prices())) == [], "it is told once"


def test_the_last_prices_stay_while_reading_fails():
    cloud = Cloud()
    rest = Rest(cloud)
    what = "Nvidia Tesla A100 GPU attached to Spot Preemptible VMs"
    rest.skus = [sku(what, "GPU", "us-central1", 1.0, spot=True)] + [
        sku(f"Spot Preemptible A2 Instance {part}", "CPU", "us-central1", 0.01, spot=True)
        for part in ("Core", "Ram")
    ]
    for part in rest.skus[2:]:
        part["pricingInfo"][0]["pricingExpression"]["usageUnit"] = "GiBy.h"
    with provider(cloud, billing=True, rest=rest) as gce:
        first = asyncio.run(gce.prices())
        cloud.denied.add("billing")
        (line,) = lines_of(lambda: asyncio.run(gce.prices()))
        assert "the last answer" in line
        assert asyncio.run(gce.prices()) == first
        cloud.denied.clear()
        rest.skus[0] = sku(what, "GPU", "us-central1", 2.0, spot=True)
        assert lines_of(lambda: asyncio.run(gce.prices())) == [
            "the Cloud Billing catalogue can be read again "
        ]
        assert asyncio.run(gce.prices())[pool()] == pytest.approx(first[pool()] + 1.0)
