"""The static provider: listed hosts, none created or deleted."""

from __future__ import annotations

import asyncio

import pytest

from sailord.capacity.core.budget import spent_usd
from sailord.capacity.core.model import (
    Agent,
    AgentsCounted,
    DeleteInstances,
    Observed,
    PricesRead,
    TargetSet,
)
from sailord.providers.interface import InstanceRequest, Pool, Refused
from sailord.providers.static import Host, StaticProvider
from tests.processes import wait_until
from tests.sailord.capacity.core.story import Story
from tests.sailord.daemon.running import Place

POOL = Pool("us-central1-b", "A100-40x2", "A100-40", 2, False)
HOSTS = (Host("a", POOL, 3.6), Host("b", POOL))


def provider(*hosts: Host) -> StaticProvider:
    return StaticProvider(hosts, lambda: 100.0, 10.0)


def look(story: Story, at: float, *hosts: Host) -> Story:
    seen = asyncio.run(provider(*hosts).observe())
    return story.hear(Observed(at, seen))


def test_a_static_provider_creates_and_deletes_nothing():
    async def play():
        listed = provider(*HOSTS)
        assert await listed.check() == ()
        assert listed.pools == ()
        assert [i.node for i in (await listed.observe()).instances] == ["a", "b"]
        assert await listed.prices() == {POOL: 3.6}
        assert isinstance(await listed.create(InstanceRequest("r", POOL, 1)), Refused)
        assert set((await listed.delete(["a"])).failed) == {"a"}
        assert [notice async for notice in listed.notices()] == []

    asyncio.run(play())


def test_a_listed_host_costs_from_the_start_and_is_never_deleted():
    story = Story().hear(PricesRead(0.0, asyncio.run(provider(*HOSTS).prices())))
    look(story, 100.0, *HOSTS).hear(TargetSet(100.0, {POOL: 0}))
    story.hear(AgentsCounted(1010.0, {"a": Agent(2)}))
    assert spent_usd(story.state) == pytest.approx(2.0), "both, since the moment 10"
    # One never registers, one falls silent: a person has to see to both.
    for at in (1100.0, 5000.0):
        assert story.hear(AgentsCounted(at, {})).of(DeleteInstances) == []
    assert set(story.state.instances) == {"a", "b"}


def test_a_host_removed_from_the_list_is_not_shown():
    story = look(Story(), 100.0, *HOSTS)
    look(look(story, 200.0, HOSTS[1]), 210.0, HOSTS[1])
    assert set(story.state.instances) == {"b"}


@pytest.mark.slow
def test_listed_hosts_are_distinguished_from_others(tmp_path):
    hosts = "".join(
        f'[[provider.host]]\nname = "{name}"\nzone = "us-central1-b"\nmachine = "A100-40x4"\n'
        for name in ("a", "b")
    )
    place = Place(
        tmp_path, webhooks=f'[provider]\nkind = "static"\n{hosts}[capacity.testing]\nlook_s = 1\n'
    )
    try:
        place.start()
        place.start_agent("a")
        place.start_agent("c")

        def states() -> dict[str, str]:
            code, value = place.ask("GET", "/v1/capacity")
            assert code == 200, value
            assert value["strangers"] == ["c"], value
            return {machine["name"]: machine["state"] for machine in value["machines"]}

        wait_until(lambda: states() == {"a": "up", "b": "awaited"})
        place.processes[1].kill()
        wait_until(lambda: states() == {"a": "silent", "b": "awaited"})
        assert place.ask("GET", "/v1/capacity")[1]["provider"] == "static"
    finally:
        place.stop_all()
