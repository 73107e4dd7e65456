"""The profiler's loop with fake agents: what it orders, repeats and writes, and when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from agents.protocol.codec import decode, encode
from agents.protocol.link_records import LinkOrder, LinkTimes, SizeTimes
from agents.protocol.records import JobId, NodeId, NodeRecord
from agents.rpc.client import CallFailed
from sailord.api.handlers.context import CONTEXT
from sailord.api.handlers.network import measure_network, show_network, show_network_file
from sailord.core.model.nodes import Node
from sailord.network import profiler as profiler_module
from sailord.network.core.model import SIZES_BYTES, NetworkPolicy
from sailord.network.profiler import ANSWER_S, ROUND_S_MAX, NetworkProfiler
from simulator.hardware.catalogue import load_catalogue
from simulator.network.network_file import network_from_json
from tests.sailord.core.states import generation

NODES = {"a1": "zone-a", "a2": "zone-a", "b1": "zone-b"}
QUESTIONS = 5
"""Inside zone-a one way and both ways, from a to b, from b to a, and both ways between them."""
Reply = Callable[[str, LinkOrder], LinkTimes]
SECONDS = 1e-3


def honest(_: str, order: LinkOrder) -> LinkTimes:
    times = tuple(
        SizeTimes(size, (SECONDS + order.flows * size / 1e9,)) for size in order.sizes_bytes
    )
    return LinkTimes(2 * SECONDS, times, sum(order.sizes_bytes))


@dataclass(eq=False)
class FakeAgents:
    """Answers as agents would, one measurement at a time; time passes meanwhile."""

    reply: Reply
    now: float = 1e6
    set_back_s: float = 0.0
    """By how much the system's clock was set back."""
    takes_s: float = 1.0
    orders: list[tuple[float, str, LinkOrder]] = field(default_factory=list)
    busy: bool = False

    def time(self) -> float:
        return self.now - self.set_back_s

    def monotonic(self) -> float:
        return self.now

    async def call(
        self, node: NodeRecord, method: str, path: str, body: bytes, *, timeout_s: float
    ) -> bytes:
        assert not self.busy, "two measurements at a time"
        assert (method, path) == ("POST", "/v1/links/measure")
        order = decode(LinkOrder, body)
        assert timeout_s == order.seconds_max + ANSWER_S
        self.orders.append((self.now, node.address, order))
        self.busy = True
        await asyncio.sleep(0)
        self.now += self.takes_s
        self.busy = False
        return encode(self.reply(node.address, order))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The ends of each order."""
        return [(sender[:2], order.peer[:2]) for _, sender, order in self.orders]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A leader's profiler, its agents and its clock."""

    def start(
        reply: Reply = honest, ids: Iterable[str] = NODES
    ) -> tuple[NetworkProfiler, FakeAgents]:
        agents = FakeAgents(reply)
        at = ("a2-highgpu-1g", "A100-40", 1)
        records = [
            NodeRecord(NodeId(id_), id_, NODES[id_], *at, f"{id_}:7078", state="ready")
            for id_ in ids
        ]
        nodes = {record.id: Node(record, since=0.0) for record in records}
        config: Any = SimpleNamespace(
            state=tmp_path,
            network=NetworkPolicy(),
            network_file=tmp_path / "network.json",
            cluster=SimpleNamespace(catalogue=load_catalogue()),
        )
        state = SimpleNamespace(active=None, generations={}, nodes=nodes)
        cluster: Any = SimpleNamespace(term=1, state=state)
        monkeypatch.setattr(profiler_module, "time", agents)
        monkeypatch.setattr(profiler_module, "PAUSE_S", 0.0)
        clock: Any = SimpleNamespace(now=agents.monotonic)
        return NetworkProfiler(config, cluster, agents, clock), agents

    return start


async def until_round_ends(profiler: NetworkProfiler, agents: FakeAgents) -> None:
    """Run the profiler; while nothing can be measured, a second passes at each look."""
    task = asyncio.create_task(profiler.run())
    try:
        for _ in range(20_000):
            await asyncio.sleep(0)
            if profiler.ordered_at is None:
                return
            if not agents.busy:
                agents.now += 0.1
            await asyncio.sleep(0.0002)
        raise AssertionError("the round does not end")
    finally:
        task.cancel()


def written(folder: Path) -> Any:
    return json.loads((folder / "network.json").read_text())


async def test_a_clock_that_is_set_back_has_no_link_measured_twice(world):
    """Bytes between zones cost money."""
    profiler, agents = world()
    profiler.order_round()
    agents.set_back_s = 3600.0
    await until_round_ends(profiler, agents)
    assert len(agents.orders) == QUESTIONS


async def test_an_ordered_round_measures_each_link_once_and_writes_the_file(world, tmp_path):
    profiler, agents = world()
    assert profiler.open_questions == [], "nothing was ordered"
    profiler.order_round()
    assert len(profiler.open_questions) == QUESTIONS
    await until_round_ends(profiler, agents)
    assert profiler.unmeasured == 0
    asked = [(pair[0][0] + pair[1][0], order.both_ways)
             for pair, (_, _, order) in zip(agents.pairs, agents.orders, strict=True)]  # fmt: skip
    assert sorted(asked) == [
        ("aa", False),
        ("aa", True),
        ("ab", False),
        ("ab", True),
        ("ba", False),
    ]
    assert all(order.sizes_bytes == SIZES_BYTES for _, _, order in agents.orders)
    read = network_from_json(written(tmp_path), place="f", catalogue=load_catalogue())
    ends = [(zone, "A100-40") for zone in ("zone-a", "zone-b")]
    assert set(read.between) == {(ends[0], ends[0]), (ends[0], ends[1]), (ends[1], ends[0])}
    assert read.between[ends[0], ends[1]][1](1 << 20) == pytest.approx(SECONDS + 2**20 / 1e9)
    # Another process goes on with the history.
    again, others = world()
    again.order_round()
    others.now = agents.now + ROUND_S_MAX
    await until_round_ends(again, others)
    assert len(again.history.all) == QUESTIONS


def test_nodes_of_each_job_that_trains_are_measured_last_and_gently(world):
    profiler, _ = world()
    known: Any = profiler.cluster.state
    known.active = SimpleNamespace(generation=generation(NodeId("a1")))
    known.generations = {
        JobId("beside"): generation(NodeId("a2")),
        JobId("paused"): replace(generation(NodeId("b1")), state="closed"),
    }
    trains = {each.id: each.is_training for each in profiler.candidates}
    assert trains == {"a1": True, "a2": True, "b1": False}


async def test_a_failed_pair_is_tried_again_later_and_others_before(world):
    failures = iter([CallFailed("nothing listens"), LinkTimes(busy="it carries 5 MB/s")])

    def reply(sender: str, order: LinkOrder) -> LinkTimes:
        failure = None if sender == "b1:7078" else next(failures, None)
        if isinstance(failure, CallFailed):
            raise failure
        return failure or honest(sender, order)

    profiler, agents = world(reply, ("a1", "b1"))
    profiler.order_round()
    await until_round_ends(profiler, agents)
    assert profiler.unmeasured == 0
    assert [(each.is_busy, each.why) for each in profiler.failures] == [
        (False, "the agent does not answer: nothing listens"),
        (True, "it carries 5 MB/s"),
    ]
    ab, ba = ("a1", "b1"), ("b1", "a1")
    assert agents.pairs == [ab, ba, ab, ab, ab]
    first, _, second, third, _ = (at for at, _, _ in agents.orders)
    assert 10.0 <= second - first < 15.0
    assert 20.0 <= third - second < 25.0


async def test_a_round_ends_after_fifteen_minutes_and_counts_what_is_left(world, tmp_path):
    def reply(sender: str, order: LinkOrder) -> LinkTimes:
        if "b1:7078" in (sender, order.peer):
            raise CallFailed("it stands still")
        return honest(sender, order)

    profiler, agents = world(reply)
    agents.takes_s = 20.0
    profiler.order_round()
    begun = agents.now
    await until_round_ends(profiler, agents)
    assert profiler.unmeasured == 3
    assert ROUND_S_MAX < agents.now - begun < ROUND_S_MAX + 60
    assert len(written(tmp_path)["inter_node"]) == 1, "what could be measured stands"


async def test_an_impossible_answer_is_not_used(world, tmp_path):
    def reply(sender: str, order: LinkOrder) -> LinkTimes:
        told = honest(sender, order)
        if sender != "a1:7078":
            return told
        absurd = tuple(SizeTimes(each.size_bytes, (1e-9,)) for each in told.times)
        return LinkTimes(told.round_trip_s, absurd, 10**18)

    profiler, agents = world(reply)
    profiler.order_round()
    await until_round_ends(profiler, agents)
    assert {each.measurement.sender for each in profiler.verdict.flagged} == {"a1"}
    assert all(each.bytes_moved <= 4 << 30 for each in profiler.history.all)
    rates = [rate for curve in written(tmp_path)["curves"] for rate in curve["bandwidth_GBps"]]
    assert max(rates) < 2.0


async def test_deposed_leader_ends_its_round(world):
    profiler, agents = world()
    profiler.order_round()
    profiler.cluster.term = None
    await until_round_ends(profiler, agents)
    assert agents.orders == []


async def test_an_order_over_http_begins_a_round_that_the_view_follows(world):
    profiler, agents = world()
    app: Any = web.Application()
    told: list[str] = []
    cluster = SimpleNamespace(tell_given=lambda said, _: told.append(said))
    app[CONTEXT] = SimpleNamespace(network=profiler, cluster=cluster)
    request = make_mocked_request("POST", "/v1/network", app=app)
    begun = await measure_network(request)
    view = json.loads(begun.body)
    assert (begun.status, view["is_measuring"], view["open"]) == (202, True, QUESTIONS)
    assert told == ["a measurement of all links was ordered"]
    at = profiler.ordered_at
    await measure_network(request)
    assert profiler.ordered_at == at, "a second order joins the round"
    await until_round_ends(profiler, agents)
    view = json.loads((await show_network(request)).body)
    assert (view["is_measuring"], view["open"], view["unmeasured"]) == (False, 0, 0)
    assert len(view["links"]) == QUESTIONS
    document = json.loads((await show_network_file(request)).body)
    assert len(document["curves"]) == QUESTIONS
