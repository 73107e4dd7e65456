"""The trace provider, alone and with a real sailord."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from sailord.client import Client
from sailord.local.paths import LocalFolders
from sailord.providers.interface import (
    DeleteResult,
    Granted,
    Instance,
    InstanceRequest,
    Observation,
    Pool,
    Provider,
    Refused,
)
from sailord.providers.trace import TraceProvider
from simulator.traces.trace import Interval, Trace
from tests.sailord.providers.emulated_cluster import cards, traced_sailord, wait_until

A, B = Pool("a", "m", "gpu", 2, True), Pool("b", "m", "gpu", 2, True)
TRACE = Trace("t", (Interval(0, 10, (4, 0)), Interval(10, 20, (2, 4)), Interval(20, 30, (0, 2))))
"""Two machines in a; then one, and two in b; then none, and one."""


@dataclass(eq=False)
class Endless(Provider):
    """A provider that has machines without end."""

    made: dict[str, Instance] = field(default_factory=dict)
    at: float = 0.0
    pools: tuple[Pool, ...] = (A, B)

    async def observe(self) -> Observation:
        return Observation(self.at, tuple(self.made.values()))

    async def create(self, ask: InstanceRequest):
        known = tuple(i for i in self.made.values() if i.request_id == ask.request_id)
        new = tuple(
            Instance(f"{ask.request_id}.{n}", "", ask.pool, "running", self.at, ask.request_id)
            for n in range(0 if known else ask.count)
        )
        self.made |= {instance.id: instance for instance in new}
        return Granted(ask.request_id, known or new)

    async def delete(self, ids) -> DeleteResult:
        for id_ in ids:
            self.made.pop(id_, None)
        return DeleteResult(tuple(ids), {})

    async def prices(self):
        return {A: 1.0, B: 2.0}


def test_a_trace_limits_and_preempts():
    within = Endless()
    replayed = TraceProvider(within, TRACE, (A, B), lambda: within.at, 0.0, 2.0)

    async def play() -> None:
        granted = await replayed.create(InstanceRequest("r1", A, 3))
        assert isinstance(granted, Granted)
        assert len(granted.instances) == 2, "no more than the trace has"
        assert await replayed.create(InstanceRequest("r1", A, 3)) == granted, (
            "one request, one effect"
        )
        assert isinstance(await replayed.create(InstanceRequest("r2", B, 1)), Refused)
        within.at = 4.9
        assert len((await replayed.observe()).instances) == 2
        within.at = 5.1  # Twice as fast: the trace is at 10.2 s.
        seen = await replayed.observe()
        assert len(seen.instances) == 1
        (taken,) = seen.preemptions
        assert seen.ended_at == {taken.instance: 5.1}
        assert len(within.made) == 1
        within.at = 6.0
        assert isinstance(await replayed.create(InstanceRequest("r3", B, 2)), Granted)
        within.at = 100.0  # After its end the last moment stays.
        seen = await replayed.observe()
        assert [i.pool for i in seen.instances] == [B]
        assert len(seen.preemptions) == 3, "a preemption is reported again"

    asyncio.run(play())


def test_a_trace_preempts_the_youngest():
    within = Endless()
    old = Instance("old", "", A, "running", 1.0, "r")
    within.made = {"new": replace(old, id="new", created_at=2.0), "old": old}
    replayed = TraceProvider(within, TRACE, (A, B), lambda: 15.0, 0.0)
    assert [i.id for i in asyncio.run(replayed.observe()).instances] == ["old"]


# ---- against a real sailord ---------------------------------------------------------------------

SPAN_S = 25
"""One machine for this time, then none for as long, again and again."""


TRACE_FILE = f"end_s = {100 * SPAN_S}\n" + "".join(
    f'[[event]]\ntime_s = {turn * SPAN_S}\nzone = "zone-c"\nmachines = {1 - turn % 2}\n'
    for turn in range(100)
)
CONFIG = """
[provider]
kind = "trace"
trace = "TRACE"
speed = 1.0
folder = "machines"
agent = "agent-base.toml"
[[provider.pool]]
zone = "zone-c"
machine = "emulated-small"
spot = true
usd_per_hour = 1.0
machines_max = 2
[capacity.testing]
look_s = 0.5
lost_s = 30.0
rest_max_s = 4.0
"""


@pytest.fixture
def place(tmp_path_factory) -> Iterator[LocalFolders]:
    with traced_sailord(tmp_path_factory.mktemp("trace"), CONFIG, TRACE_FILE) as place:
        yield place


@pytest.mark.at_length
def test_a_real_sailord_follows_a_trace(place):
    client = Client(f"unix://{place.socket}")
    wait_until(lambda: client.ask("GET", "/readyz"))
    client.ask("POST", "/v1/jobs", {"job": place.job("job.toml"), "id": "tale"})
    (first,) = wait_until(lambda: cards(place))
    assert first["pool"]["zone"] == "zone-c"
    wait_until(lambda: first["id"] not in {card["id"] for card in cards(place)})

    def resting() -> list[str]:
        pools = client.ask("GET", "/v1/capacity")["pools"]
        return [pool["rest"]["kind"] for pool in pools if pool["rest"]]

    wait_until(lambda: resting() == ["stockout"])
    (second,) = wait_until(lambda: cards(place))
    assert second["id"] != first["id"]
    client.ask("POST", "/v1/jobs/tale/cancel", {})
    wait_until(lambda: cards(place) == [])
