"""Finding the rendezvous of a generation."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agents.protocol.records import GenerationRecord, JobId, NodeId, NodeRecord
from agents.workers import join
from agents.workers.join import GenerationJoiner
from agents.workers.specs import RankMap
from agents.workers.status import WorkerStatus

HERE, FIRST = NodeId("b.1"), NodeId("a.1")


def record(id_: NodeId, address: str) -> NodeRecord:
    return NodeRecord(id_, id_.partition(".")[0], "z", "m", "g", 1, address)


@dataclass
class Others:
    """Fakes of the store, the agent of rank 0's node, and this node's gang."""

    is_at: str
    """The present address of that agent."""
    told: asyncio.Future[str]
    asked: list[str] = field(default_factory=list)

    async def nodes(self) -> tuple[NodeRecord, ...]:
        return (record(FIRST, self.is_at), record(HERE, "here:1"))

    async def ask(self, agent: str, *_: object) -> str | None:
        self.asked.append(agent)
        return "the place" if agent == self.is_at else None

    def send_rendezvous(self, _: int, place: str) -> None:
        self.told.set_result(place)


@pytest.mark.parametrize(
    "peers",
    [{FIRST: {"address": "before:1", "name": "b"}}, {}],
    ids=["was started anew", "was not there"],
)
async def test_the_rendezvous_is_asked_at_the_present_address_of_rank_0s_node(
    peers: dict[str, Any], monkeypatch
):
    monkeypatch.setattr(join, "ASK_AGAIN_S", 0.01)
    others = Others("now:2", asyncio.get_running_loop().create_future())
    ours = SimpleNamespace(id=HERE)
    any_: Any = others
    joiner = GenerationJoiner(any_, lambda: cast(Any, ours), any_, others.nodes, any_, any_, any_)
    joiner._find_rendezvous(
        RankMap(2, {1: 0}, FIRST), {"job": "j", "generation": 2, "peers": peers}
    )
    assert await asyncio.wait_for(others.told, 10) == "the place"
    assert others.asked[-1] == "now:2"


async def nothing() -> None: ...


async def test_a_generation_that_is_over_once_the_node_is_prepared_starts_nothing(monkeypatch):
    """It is not refused either: failures are reported of the present generation."""
    gang: Any = SimpleNamespace(job=JobId("j"), generation=2, wait_reconnected=nothing)

    async def details_of(_: GenerationRecord) -> Any:
        return SimpleNamespace(plan="")

    async def work_of(_: JobId) -> str:
        gang.generation = 3
        return "not prepared"

    monkeypatch.setattr(join, "read_rank_map", lambda *_: RankMap(2, {1: 0}, FIRST))
    any_: Any = None
    ours: Any = SimpleNamespace(id=HERE)
    joiner = GenerationJoiner(any_, lambda: ours, details_of, any_, gang, any_, work_of)
    record: Any = SimpleNamespace(job=JobId("j"), number=2)
    await joiner.join(record)


@pytest.mark.parametrize("names_file", [True, False])
async def test_a_full_disk_at_a_join_is_refused_by_its_name(monkeypatch, tmp_path, names_file):
    refused: list[str] = []
    gang: Any = SimpleNamespace(
        job=JobId("j"), generation=2, refuse=refused.append, wait_reconnected=nothing
    )

    async def details_of(_: GenerationRecord) -> Any:
        return SimpleNamespace(plan="")

    async def work_of(_: JobId) -> dict[str, Any]:
        return {}

    def write(*_: object) -> None:
        name = ("/a/plan.json",) if names_file else ()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *name)

    monkeypatch.setattr(join, "read_rank_map", lambda *_: RankMap(2, {1: 0}, FIRST))
    monkeypatch.setattr(join, "write_generation_files", write)
    settings: Any = SimpleNamespace(home=lambda number: tmp_path / str(number))
    any_: Any = None
    ours: Any = SimpleNamespace(id=HERE)
    joiner = GenerationJoiner(settings, lambda: ours, details_of, any_, gang, any_, work_of)
    record: Any = SimpleNamespace(job=JobId("j"), number=2)
    await joiner.join(record)
    place = "/a/plan.json" if names_file else tmp_path / "2"
    assert refused == [f"{place}: No space left on device; free room there"]


async def test_rank_0_alone_says_where_all_ranks_meet():
    said: list[Any] = []

    async def publish(*told: object) -> None:
        said.append(told)

    rendezvous: Any = SimpleNamespace(known=lambda *_: None, publish=publish)
    gang: Any = SimpleNamespace(send_rendezvous=lambda *told: said.append(told))
    any_: Any = None
    joiner = GenerationJoiner(any_, any_, any_, any_, gang, rendezvous, any_)
    joiner.hear(JobId("j"), WorkerStatus(2, 1, "preparing", 0, meeting="10.0.0.66:1"))
    joiner.hear(JobId("j"), WorkerStatus(2, 0, "preparing", 0, meeting="10.0.0.5:1"))
    async with asyncio.timeout(10):
        while len(said) < 2:
            await asyncio.sleep(0)
    assert said == [("j", 2, "10.0.0.5:1"), (2, "10.0.0.5:1")]
