"""The real worker under real agents: it trains, reconfigures, and survives a lost node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from agents.protocol.codec import encode
from agents.protocol.records import JobRecord, NodeRecord, Point, Report, Restore, Saving
from agents.store.interface import Put
from sailord.core.queries.restore_point import complete_points
from tests.agents.running import JOB, PREFIX, Place, place, plan_on
from tests.fakes.slow_worker import SEAL_S
from tests.processes import until


async def is_past(here: Place, name: str, generation: int, step: int) -> Report | None:
    """Return the report if the node runs this generation and has passed a step."""
    report = await here.report(name)
    if report is not None and report.taking == "failed":
        raise AssertionError(report.failure)
    is_there = report is not None and report.generation == generation and report.step > step
    return report if is_there else None


async def sealed_by_both(here: Place) -> Point | None:
    """Return the newest point after step 3 that both nodes have sealed."""
    reports = [await here.report(name) for name in "ab"]
    if None in reports:
        return None
    points = [{sealed.point for sealed in report.sealed} for report in reports]
    newest = max(set.intersection(*points), default=None)
    return newest if newest is not None and newest.step > 3 else None


async def two_nodes(here: Place, roomless: str = "") -> tuple[NodeRecord, NodeRecord]:
    here.worker = "worker.control.worker_process"
    here.start("a")
    here.start("b", zone="us-central1-c", memory_mib=1 if roomless == "b" else None)
    return await here.ready("a"), await here.ready("b")


@pytest.mark.slow
async def test_training_continues_after_a_reconfiguration_in_place(tmp_path):
    async with place(tmp_path) as here:
        a, b = await two_nodes(here)
        both = plan_on(a.id, b.id)
        await here.open(a, 1, plan=both, members=(a.id, b.id), memory_every=2)
        report = await until(lambda: is_past(here, "a", 1, 4))
        assert report.loss is not None
        assert report.tokens_per_s is not None
        assert {name for name, _ in report.phases} == {"fetch", "rebuild", "verify", "first_step"}
        workers = {**here.workers(1, "a"), **here.workers(1, "b")}
        stopping = {"state": "stopping", "stop_at": report.step + 2}
        await here.open(a, 1, plan=both, members=(a.id, b.id), memory_every=2, **stopping)
        report = await until(lambda: here.is_taking("stopped"))
        await until(lambda: here.is_taking("stopped", "b"))
        point = Point(report.step, 1)
        restore, only = Restore(point, "memory"), plan_on(b.id, b.id)
        await here.open(b, 2, plan=only, members=(b.id,), restore=restore, memory_every=2)
        await until(lambda: is_past(here, "b", 2, point.step + 2))
        assert here.workers(2, "b")[0] == workers[1], "its process lives on as its next rank"


@pytest.mark.slow
async def test_a_single_node_job_survives_its_node_through_a_spare_nodes_replica(tmp_path):
    async with place(tmp_path) as here:
        a, b = await two_nodes(here)
        await here.open(a, 1, plan=plan_on(a.id), members=(a.id,), memory_every=1)
        await until(lambda: is_past(here, "a", 1, 3))
        held = await until(lambda: holds_all(here, "b", 3))
        here.agents[0].kill()
        for pid in here.workers(1, "a").values():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(here.memory("a"))
        restore = Restore(held, "memory")
        await here.open(b, 2, plan=plan_on(b.id), members=(b.id,), restore=restore)
        await until(lambda: is_past(here, "b", 2, held.step))


@pytest.mark.slow
async def test_missing_room_for_snapshots_is_reported_before_training(tmp_path):
    async with place(tmp_path) as here:
        a, b = await two_nodes(here, roomless="b")
        both = plan_on(a.id, b.id)
        await here.open(a, 1, plan=both, members=(a.id, b.id), fallback=Point(0, 0))
        report = await until(lambda: here.is_taking("failed", "b"))
        assert "no room for snapshots: 4.1 MiB are needed on this node" in report.unfit
        assert "1.0 MiB are free; enlarge that file system" in report.unfit
        assert (report.step, report.is_bug) == (0, False)
        await here.open(a, 2, plan=plan_on(a.id), members=(a.id,))
        await until(lambda: is_past(here, "a", 2, 2))
        report = await here.report("b")
        assert report.unfit, "it is still too small"


@pytest.mark.slow
async def test_a_worker_that_ignores_an_abort_is_killed_and_its_rank_forked_again(tmp_path):
    """It may be blocked in the kernel, waiting for a dead peer."""
    async with place(tmp_path) as here:
        a, b = await two_nodes(here)
        both = {"plan": plan_on(a.id, b.id), "members": (a.id, b.id)}
        await here.open(a, 1, memory_every=1, **both)
        await until(lambda: sealed_by_both(here))
        (deaf,), (dead,) = here.workers(1, "b").values(), here.workers(1, "a").values()
        os.kill(deaf, signal.SIGSTOP)
        os.kill(dead, signal.SIGKILL)
        await until(lambda: here.is_taking("failed"))
        # Until then they trained on, and dropped older snapshots.
        held = await until(lambda: sealed_by_both(here))
        await here.open(a, 2, restore=Restore(held, "memory"), **both)
        await until(lambda: is_past(here, "b", 2, held.step))
        assert deaf not in here.workers(2, "b").values()
        assert not Path("/proc", str(deaf)).exists()


@pytest.mark.slow
async def test_the_others_of_a_failed_node_report_what_they_still_seal(tmp_path):
    async with place(tmp_path) as here:
        here.worker, here.environment = "tests.fakes.slow_worker", {SEAL_S: "1.0"}
        here.start("a")
        a = await here.ready("a")
        await here.open(a, 1, plan=plan_on(a.id, a.id), members=(a.id,), memory_every=1)
        await until(lambda: is_past(here, "a", 1, 2))
        os.kill(here.workers(1, "a")[1], signal.SIGKILL)

        async def seals() -> Report | None:
            report = await here.is_taking("failed")
            return report if report is not None and report.sealing is not None else None

        async def has_sealed() -> Report | None:
            report = await here.is_taking("failed")
            return report if report is not None and report.sealing is None else None

        step = (await until(seals)).sealing.step
        report = await until(has_sealed)
        assert step in {sealed.point.step for sealed in report.sealed}


async def holds_all(here: Place, name: str, step: int) -> Point | None:
    """Return the newest point that the node holds completely, if it is not older than a step."""
    report = await here.report(name)
    held = [] if report is None else [(report.node, sealed) for sealed in report.sealed]
    # Two layers with embedding and head, one for shared tensors; two atoms, and the uncut piece.
    points = complete_points(held, layers=5, atoms=3)
    return max((point for point in points if point.step >= step), default=None)


@pytest.mark.slow
async def test_training_continues_from_memory_after_a_lost_node(tmp_path):
    async with place(tmp_path) as here:
        a, b = await two_nodes(here)
        both = plan_on(a.id, b.id)
        await here.open(a, 1, plan=both, members=(a.id, b.id), memory_every=1)
        await until(lambda: is_past(here, "a", 1, 3))
        here.agents[0].kill()
        for pid in here.workers(1, "a").values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        report = await until(lambda: here.is_taking("broken", "b"))
        assert report.broken_peers == (a.id,)
        restore = Restore(report.sealed[-1].point, "memory")
        assert restore.point.step >= 3
        await here.open(b, 2, plan=plan_on(b.id), members=(b.id,), restore=restore)
        await until(lambda: is_past(here, "b", 2, restore.point.step))


@pytest.mark.slow
async def test_an_outage_of_the_durable_store_costs_checkpoints_and_no_training(tmp_path):
    """The node has room for its snapshots, and none for files that wait for upload."""
    (tmp_path / "far").write_text("a file where the durable folder should be")
    async with place(tmp_path) as here:
        here.worker = "worker.control.worker_process"
        here.start("a", memory_mib=6)
        a = await here.ready("a")
        saving = Saving(uri=f"file://{tmp_path}/far")
        job = JobRecord(JOB, "running", layers=5, atoms=3, saving=saving)
        await here.store.transact([], [Put(f"{PREFIX}job/{JOB}/state", encode(job))])
        often = {"memory_every": 1, "persist_every": 1}
        await here.open(a, 1, plan=plan_on(a.id), members=(a.id,), **often)
        report = await until(lambda: is_past(here, "a", 1, 20))
        # Either consequence may be the newest: one gave its room up, or another was not written.
        assert "is not uploaded: " in report.trouble or "is skipped, since " in report.trouble
        assert "far/" in report.trouble, "why the store takes nothing is said too"
        # Files that still wait take no room from the next generation.
        await here.open(a, 2, plan=plan_on(a.id), members=(a.id,), **often)
        await until(lambda: is_past(here, "a", 2, 3))
