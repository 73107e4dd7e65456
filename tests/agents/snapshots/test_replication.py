"""Replication of snapshots: to which node, in which order, at which rate, and after failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
import xxhash
from aiohttp import web

from agents.protocol.records import Holding, JobId, NodeId, NodeRecord, Point, Restore, Sealed
from agents.rpc.client import SignedClient
from agents.rpc.signing import ClusterKey, Verifier
from agents.snapshots import http, replication
from agents.snapshots.http import SnapshotRoutes
from agents.snapshots.memory import SnapshotFile, SnapshotMemory
from agents.snapshots.readers import ReadAdmission
from agents.snapshots.replication import Replicator
from tests.agents.running import place, plan_on
from tests.agents.sealing import write_snapshot
from tests.processes import until
from worker.checkpoint import snapshot_file
from worker.checkpoint.snapshot_file import ANY_NODE

KEY = ClusterKey("test", (b"a-key-that-is-long-enough",))
JOB = JobId("job")
OWN = NodeRecord(NodeId("a"), "a", "z1", "box", "A100-40", 2, "127.0.0.1:1", "ready")


@dataclass
class World:
    """This node's snapshots, and the HTTP servers of the other nodes."""

    folder: Path
    session: aiohttp.ClientSession
    own: NodeRecord = OWN
    nodes: dict[NodeId, NodeRecord] = field(default_factory=dict)
    memories: dict[str, SnapshotMemory] = field(default_factory=dict)
    done: list[tuple[int, str]] = field(default_factory=list)
    runners: list[web.AppRunner] = field(default_factory=list)

    async def add(self, name: str, zone: str) -> None:
        memory = self.memories[name] = SnapshotMemory(self.folder / name)
        memory.open()
        app = web.Application()
        verifier = Verifier(KEY, lambda: f"127.0.0.1:{runner.addresses[0][1]}")
        SnapshotRoutes(memory, verifier, ReadAdmission(verifier)).add_to(app.router)
        runner = web.AppRunner(app)
        await runner.setup()
        self.runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"127.0.0.1:{runner.addresses[0][1]}"
        record = replace(OWN, id=NodeId(name), name=name, zone=zone, address=address)
        self.nodes[record.id] = record

    def buddies(
        self, rate_bytes_s: float = 1e9, patience_s: float = 0.0, survive: str = "node"
    ) -> Replicator:
        async def others() -> tuple[NodeRecord, ...]:
            return (self.own, *self.nodes.values())

        def done(snapshot: SnapshotFile, trouble: str) -> None:
            self.done.append((snapshot.point.step, trouble))

        return Replicator(
            client=SignedClient(self.session, KEY),
            node=lambda: self.own,
            find=self.nodes.get,
            others=others,
            rate_bytes_s=rate_bytes_s,
            is_present=lambda _: True,
            done=done,
            patience_s=patience_s,
            outlives_zone=lambda _: survive == "zone",
        )

    def snapshot(self, step: int, **changes) -> SnapshotFile:
        header = write_snapshot(self.folder / "own", step=step, **{"buddy": "b", **changes})
        folder = self.folder / "own" / "job" / f"{header.generation}-{step}"
        return SnapshotFile(folder / header.file_name, header)

    async def run(self, buddies: Replicator, *snapshots: SnapshotFile) -> None:
        for snapshot in snapshots:
            buddies.add(snapshot)
        task = asyncio.create_task(buddies.run())
        await until(lambda: len(self.done) >= len(snapshots))
        task.cancel()

    def held(self, name: str) -> list[Sealed]:
        return list(self.memories[name].sealed(JOB))


@pytest.fixture
async def world(tmp_path):
    async with aiohttp.ClientSession() as session:
        made = World(tmp_path, session)
        await made.add("b", "z1")
        await made.add("c", "z2")
        yield made
        for runner in made.runners:
            await runner.cleanup()


WHOLE = (Holding(0, 0, 1), Holding(1, 1, 2))


def named_buddies(world: World, step: int, buddy: dict[tuple[int, int], str]) -> SnapshotFile:
    """Seal a snapshot of three pieces, each with its own buddy or none."""
    pieces = {(0, 0): b"a" * 3000, (0, 1): b"b" * 70, (1, 2): b"c"}
    header = write_snapshot(world.folder / "own", step=step, pieces=pieces)
    header = replace(
        header, pieces=tuple(replace(p, buddy=buddy.get(p.key)) for p in header.pieces)
    )
    path = world.folder / "own" / "job" / f"1-{step}" / "0.snap"
    with path.open("r+b") as file:
        file.write(snapshot_file.head_bytes(header))
    return SnapshotFile(path, header)


async def test_a_buddy_gets_only_the_pieces_that_name_it(world):
    snapshot = named_buddies(world, 4, {(0, 0): "b", (1, 2): "c"})
    await world.run(world.buddies(), snapshot)
    assert world.held("b") == [Sealed(Point(4, 1), (Holding(0, 0, 1),))]
    assert world.held("c") == [Sealed(Point(4, 1), (Holding(1, 2, 3),))]
    assert world.done == [(4, "")]
    (found,) = snapshot_file.sealed_files(world.folder / "b" / "job" / "1-4")
    assert found.header.node == snapshot.header.node, "a copy keeps its writer's name"
    assert snapshot_file.read_piece(found.path, found.header.pieces[0]) == b"a" * 3000


async def test_pieces_of_a_buddy_that_is_away_do_not_take_the_place_of_anothers(world):
    """A node keeps one file of each rank at a point."""
    snapshot = named_buddies(world, 4, {(0, 0): "b", (1, 2): "c"})
    there = world.nodes[NodeId("b")]
    world.nodes[NodeId("b")] = replace(there, address="127.0.0.1:9")
    await world.run(world.buddies(), snapshot)
    assert world.held("c") == [Sealed(Point(4, 1), (Holding(1, 2, 3),))]
    ((_, trouble),) = world.done
    assert "no replica of snapshot 0.snap of step 4: b could not be reached" in trouble
    world.nodes[NodeId("b")] = there
    world.done.clear()
    await world.run(world.buddies(), snapshot)
    assert world.held("b") == [Sealed(Point(4, 1), (Holding(0, 0, 1),))]
    assert world.done == [(4, "")]


async def test_pieces_with_other_holders_are_not_replicated(world):
    await world.run(world.buddies(), world.snapshot(4, buddy=None))
    assert world.held("b") == world.held("c") == []
    assert world.done == [(4, "")]


async def test_the_oldest_snapshot_is_sent_first_and_the_newest_while_draining(world):
    order = [world.snapshot(step) for step in (2, 3, 1)]
    await world.run(world.buddies(), *order)
    assert [step for step, _ in world.done] == [1, 2, 3]
    world.done.clear()
    world.own = replace(OWN, state="draining")
    await world.run(world.buddies(), *(world.snapshot(step) for step in (5, 7, 6)))
    assert [step for step, _ in world.done] == [7, 6, 5]


async def test_a_lost_buddy_is_replaced_by_a_node_of_the_same_zone_first(world):
    await world.add("d", "z1")
    world.nodes[NodeId("b")] = replace(world.nodes[NodeId("b")], address="127.0.0.1:9")
    await world.run(world.buddies(), world.snapshot(4))
    assert world.held("d") == [Sealed(Point(4, 1), WHOLE)]
    assert world.held("c") == []
    assert world.done == [(4, "")]


async def test_a_job_that_survives_zones_replicates_to_another_zone(world):
    world.nodes[NodeId("c")] = replace(world.nodes[NodeId("c")], address="127.0.0.1:9")
    await world.run(world.buddies(survive="zone"), world.snapshot(4, buddy="c"))
    assert world.held("b") == []
    ((step, trouble),) = world.done
    assert (step, trouble.startswith("no replica of snapshot")) == (4, True)
    world.done.clear()
    await world.add("d", "z3")
    await world.run(world.buddies(survive="zone"), world.snapshot(5, buddy="c"))
    assert world.held("d") == [Sealed(Point(5, 1), WHOLE)]


async def test_a_ready_node_in_another_zone_comes_before_a_buddy_in_this_zone(world):
    await world.run(world.buddies(survive="zone"), world.snapshot(4))
    assert world.held("b") == []
    assert world.held("c") == [Sealed(Point(4, 1), WHOLE)]
    assert world.done == [(4, "")]


@pytest.mark.parametrize(("survive", "taker"), [("node", "b"), ("zone", "c")])
async def test_a_spare_node_takes_the_replica_if_no_member_can(world, survive, taker):
    await world.run(world.buddies(survive=survive), world.snapshot(4, buddy=ANY_NODE))
    assert {name: world.held(name) for name in "bc" if world.held(name)} == {
        taker: [Sealed(Point(4, 1), WHOLE)]
    }
    assert world.done == [(4, "")]


@pytest.mark.parametrize(
    ("survive", "said"),
    [("node", ""), ("zone", "replicas stay in z1: no node in another zone is ready")],
)
async def test_without_another_node_nothing_waits_for_a_replica(world, survive, said):
    world.nodes[NodeId("b")] = replace(world.nodes[NodeId("b")], state="draining")
    del world.nodes[NodeId("c")]
    buddies = world.buddies(patience_s=60.0, survive=survive)
    await world.run(buddies, world.snapshot(4, buddy=ANY_NODE))
    assert world.held("b") == []
    assert world.done == [(4, said)]


async def test_the_list_of_nodes_is_cached_and_survives_an_outage_of_the_store(world):
    asked = []
    buddies = world.buddies()

    async def others() -> tuple[NodeRecord, ...]:
        asked.append(len(asked))
        return tuple(world.nodes.values()) if len(asked) == 1 else ()

    buddies.others = others
    await world.run(buddies, *(world.snapshot(step, buddy=ANY_NODE) for step in (1, 2)))
    assert len(asked) == 1
    buddies._seen_at = float("-inf")
    world.done.clear()
    await world.run(buddies, world.snapshot(3, buddy=ANY_NODE))
    assert len(asked) == 2
    assert [sealed.point.step for sealed in world.held("b")] == [1, 2, 3]


async def test_replicas_that_must_stay_in_the_zone_are_reported(world):
    del world.nodes[NodeId("c")]
    await world.run(world.buddies(survive="zone"), world.snapshot(4))
    assert world.held("b") == [Sealed(Point(4, 1), WHOLE)]
    assert world.done == [(4, "replicas stay in z1: no node in another zone is ready")]


async def test_a_replication_is_retried_while_the_buddys_agent_restarts(world):
    del world.nodes[NodeId("c")]
    there = world.nodes[NodeId("b")]
    world.nodes[NodeId("b")] = replace(there, address="127.0.0.1:9")
    buddies = world.buddies(patience_s=60.0)
    buddies.add(world.snapshot(4))
    task = asyncio.create_task(buddies.run())
    await asyncio.sleep(0.05)
    assert not world.done
    world.nodes[NodeId("b")] = there
    await until(lambda: world.done)
    assert world.done == [(4, "")]
    assert world.held("b")
    task.cancel()


async def test_after_a_failure_each_snapshot_is_tried_once_until_one_succeeds(world):
    there = world.nodes[NodeId("b")]
    world.nodes = {NodeId("b"): replace(there, address="127.0.0.1:9")}
    buddies = world.buddies(patience_s=60.0)
    buddies._has_given_up = True
    await world.run(buddies, world.snapshot(4), world.snapshot(5))
    assert all(trouble for _, trouble in world.done)
    world.nodes[NodeId("b")] = there
    world.done.clear()
    await world.run(buddies, world.snapshot(6))
    assert world.done == [(6, "")]
    assert not buddies._has_given_up


async def test_a_buddy_that_stops_reading_is_replaced(world, monkeypatch):
    monkeypatch.setattr(replication, "SILENT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # Only the kernel answers.
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        world.nodes[NodeId("b")] = replace(world.nodes[NodeId("b")], address=address)
        more_than_the_kernel_takes = {(0, 0): bytes(24 << 20)}
        await world.run(world.buddies(), world.snapshot(4, pieces=more_than_the_kernel_takes))
    assert world.held("c") == [Sealed(Point(4, 1), (Holding(0, 0, 1),))]
    assert world.done == [(4, "")]


async def test_a_buddy_that_makes_room_for_a_large_file_is_waited_for(world, monkeypatch):
    """It takes half a second per GB, in which the kernel alone takes bytes."""
    made, create = [], snapshot_file.create
    snapshot = world.snapshot(4, pieces={(0, 0): bytes(24 << 20)})

    def slowly(path: Path, size: int) -> int:
        time.sleep(0.6)
        made.append(path)
        return create(path, size)

    monkeypatch.setattr(snapshot_file, "create", slowly)
    monkeypatch.setattr(replication, "SILENT_S", 0.2)
    monkeypatch.setattr(replication, "PREPARED_BYTES_S", 1 << 20)
    await world.run(world.buddies(), snapshot)
    assert world.held("b") == [Sealed(Point(4, 1), (Holding(0, 0, 1),))]
    assert len(made) == 1


async def test_a_slow_rate_is_not_taken_for_a_buddy_that_stopped_reading(world, monkeypatch):
    monkeypatch.setattr(replication, "SILENT_S", 1.0)
    pieces = {(0, 0): bytes(2 << 20)}
    await world.run(world.buddies(rate_bytes_s=8e5), world.snapshot(4, pieces=pieces))
    assert world.held("b") == [Sealed(Point(4, 1), (Holding(0, 0, 1),))]


async def test_the_snapshots_of_a_past_generation_make_way_for_the_present_one(world):
    present = 1
    buddies = world.buddies(rate_bytes_s=1e4)
    buddies.is_present = lambda each: each.header.generation == present
    for step in (3, 4):  # Each would take minutes.
        buddies.add(world.snapshot(step, pieces={(0, 0): bytes(3 << 20)}))
    task = asyncio.create_task(buddies.run())
    await until(lambda: list((world.folder / "b").rglob("*.part")))
    present = 2
    buddies.add(world.snapshot(5, generation=2))
    await until(lambda: len(world.done) == 3)
    task.cancel()
    assert world.done == [(3, ""), (4, ""), (5, "")]
    assert world.held("b") == [Sealed(Point(5, 2), WHOLE)]


async def test_training_does_not_wait_for_a_replica_that_no_node_can_take(world):
    world.nodes[NodeId("b")] = replace(world.nodes[NodeId("b")], address="127.0.0.1:9")
    world.nodes[NodeId("c")] = replace(world.nodes[NodeId("c")], state="draining")
    await world.run(world.buddies(), world.snapshot(4))
    ((step, trouble),) = world.done
    assert step == 4
    assert "no replica of snapshot 0.snap of step 4: b could not be reached" in trouble


async def test_a_snapshot_that_was_deleted_or_reused_is_skipped(world):
    gone, changed, good = (world.snapshot(step) for step in (1, 2, 3))
    shutil.rmtree(gone.path.parent)
    with changed.path.open("r+b") as file:
        snapshot_file.unseal(file.fileno())
        file.seek(changed.header.pieces[0].offset)
        file.write(b"of another step")
    await world.run(world.buddies(), gone, changed, good)
    assert world.done == [(1, ""), (2, ""), (3, "")]
    assert [sealed.point.step for sealed in world.held("b")] == [3]


async def test_a_damaged_snapshot_is_reported_and_not_tried_again(world):
    damaged = world.snapshot(2)
    with damaged.path.open("r+b") as file:
        file.seek(damaged.header.pieces[0].offset)
        file.write(b"?")
    await world.run(world.buddies(patience_s=600.0), damaged)
    ((_, said),) = world.done
    assert said == (
        f"no replica: {damaged.path}: piece 0 of layer 0 is damaged: its checksum does not match"
    )


async def test_the_rate_is_limited_until_the_node_drains(world):
    pieces = {(0, 0): bytes(3 << 20)}
    slow = world.buddies(rate_bytes_s=1e4)  # The transfer would take minutes.
    slow.add(world.snapshot(1, pieces=pieces))
    task = asyncio.create_task(slow.run())
    with contextlib.suppress(TimeoutError):
        await until(lambda: world.done, within_s=0.5)
    assert not world.done
    task.cancel()
    world.own = replace(OWN, state="draining")
    # At that rate it would take longer than a test may.
    await world.run(world.buddies(rate_bytes_s=1e4), world.snapshot(2, pieces=pieces))
    assert world.held("b")


# ---- with real agents ---------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_pieces_of_a_lost_node_are_on_its_buddy(tmp_path):
    async with place(tmp_path) as here:
        agent = here.start("a")
        here.start("b", zone="us-central1-c")
        a, b = await here.ready("a"), await here.ready("b")
        await here.open(a, 1)
        await until(lambda: here.step(1) > 12)

        async def copied() -> Point | None:
            report = await here.report("b")
            whole = Sealed(Point(10, 1), tuple(Holding(layer, 0, 3) for layer in range(5)))
            return report is not None and whole in report.sealed

        await until(copied)
        agent.kill()
        for pid in here.workers(1).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(here.memory("a"))
        restore = Restore(Point(10, 1), "memory")
        plan = plan_on(b.id, b.id)
        await here.open(b, 2, plan=plan, members=(b.id,), restore=restore)
        await until(lambda: here.step(2, name="b") > 12)


async def test_no_replica_goes_to_a_node_of_another_job(world):
    """Not even to the buddy that the snapshot names: nobody would release it there."""
    buddies = world.buddies()
    buddies.takes_replicas = lambda node, _job: node != "b"
    await world.run(buddies, world.snapshot(4))
    assert world.done == [(4, "")]
    assert world.held("b") == []
    assert [each.point.step for each in world.held("c")] == [4]


def test_a_replica_of_another_version_is_checked_by_its_own_bytes(tmp_path):
    """A newer version's header has more in it, and so another checksum than ours of the same."""
    header = write_snapshot(tmp_path, step=4)
    path = tmp_path / "job" / "1-4" / header.file_name
    document = {**snapshot_file.header_document(header), "newer": 1}
    text = json.dumps(document, separators=(",", ":")).encode()
    digest = xxhash.xxh3_128_digest(text)
    with path.open("r+b") as file:
        file.write(snapshot_file.PRELUDE.pack(snapshot_file.MAGIC, len(text), digest) + text)
    assert http._defect(path, digest.hex()) == ""
    assert "announced checksum" in http._defect(path, "0" * 32)
    memory = SnapshotMemory(tmp_path)
    memory.open()
    assert memory.head_checksums(JOB, Point(4, 1)) == {digest.hex()}, "it is not sent again"


def test_headers_without_checksums_of_weights_are_those_of_versions_that_have_none(tmp_path):
    header = write_snapshot(tmp_path, step=4)
    for row in snapshot_file.header_document(header)["pieces"]:
        assert len(row) == 7
    weights = replace(header.pieces[0], weights_checksum="f" * 32)
    known = replace(header, pieces=(weights, *header.pieces[1:]))
    assert snapshot_file.header_document(known)["pieces"][0][-1] == "f" * 32
    assert snapshot_file.header_from(snapshot_file.header_document(known), name="it") == known
