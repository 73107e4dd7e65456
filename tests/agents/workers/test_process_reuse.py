"""Worker processes are reused by later generations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from agents.protocol.records import Point, Restore
from agents.workers.fork_client import ForkClient
from tests.agents.running import ROOT, place, plan_on
from tests.processes import until


@pytest.mark.slow
async def test_a_killed_rank_is_forked_again_and_the_others_are_reused(tmp_path):
    async with place(tmp_path) as here:
        _, node = await here.train()
        before = here.workers(1)
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: here.is_taking("failed"))
        await here.open(node, 2)
        await until(lambda: here.step(2) > 2)
        after = here.workers(2)
        assert after[0] == before[0]
        assert after[1] != before[1]


@pytest.mark.slow
async def test_unused_processes_end_and_missing_ones_are_forked(tmp_path):
    async with place(tmp_path) as here:
        _, node = await here.train(ranks=2)
        two = here.workers(1)
        await here.open(node, 2, ranks=1)
        await until(lambda: here.step(2) > 0)
        assert here.workers(2) == {0: two[0]}
        # It holds a device, but not the one on which the other trains already.
        await until(lambda: not here.workers(1))
        await here.open(node, 3, ranks=2)
        await until(lambda: here.step(3) > 0)
        assert here.workers(3)[0] == two[0]
        assert here.workers(3)[1] != two[1]


@pytest.mark.slow
async def test_a_restarted_agent_takes_over_idle_workers_too(tmp_path):
    async with place(tmp_path) as here:
        agent, node = await here.train()
        workers = here.workers(1)
        await here.open(node, 1, state="closed")

        async def is_free():
            report = await here.is_taking("idle")
            return report is not None and report.generation == 0

        await until(is_free)
        assert here.workers(1) == workers
        agent.kill()
        agent.wait()
        here.start()
        await until(is_free)
        await here.open(node, 2)
        await until(lambda: here.step(2) > 0)
        assert here.workers(2) == workers


@pytest.mark.slow
async def test_ranks_of_two_nodes_meet_and_fetch_each_others_snapshots(tmp_path):
    async with place(tmp_path) as here:
        here.start("a")
        here.start("b", zone="us-central1-c")
        a, b = await here.ready("a"), await here.ready("b")
        await here.open(a, 1, plan=plan_on(a.id, a.id))
        await until(lambda: here.step(1) > 12)
        await here.open(a, 1, plan=plan_on(a.id, a.id), state="stopping", stop_at=15)
        report = await until(lambda: here.is_taking("stopped"))
        point = Point(report.step, 1)
        assert point in {sealed.point for sealed in report.sealed}
        # The other node takes over and fetches from the first node's memory.
        restore, both = Restore(point, "memory"), plan_on(b.id, a.id)
        await here.open(a, 2, plan=both, members=(a.id, b.id), restore=restore)
        await until(lambda: here.step(2, name="b") > point.step + 3)
        assert here.step(2, rank=1, name="a") > point.step
        assert sorted(here.workers(2, "b")) == [0]
        assert sorted(here.workers(2, "a")) == [1]


async def test_a_plan_without_a_rank_on_the_node_is_reported(tmp_path):
    async with place(tmp_path) as here:
        here.start()
        node = await here.ready()
        await here.open(node, 1, plan=plan_on("another.node.1"))
        report = await until(lambda: here.is_taking("failed"))
        assert report.failure == "the plan has no rank on this node"


@pytest.mark.slow
async def test_an_orphaned_fork_server_ends(tmp_path):
    def fork_server(name: str, orphan_s: float) -> subprocess.Popen[bytes]:
        words = (
            "agents.workers.fork_server",
            str(tmp_path / name),
            "tests.fakes.worker",
            str(orphan_s),
        )
        return subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT)

    forgotten, unreachable = fork_server("late", 0.1), fork_server("gone", 1e6)
    try:
        await until((tmp_path / "gone").exists)
        (tmp_path / "gone").unlink()
        await until(lambda: forgotten.poll() == unreachable.poll() == 0)
    finally:
        for process in (forgotten, unreachable):
            process.kill()
            process.wait()


async def test_fork_server_that_cannot_record_a_worker_says_why_and_goes_on(tmp_path):
    """As on a full disk; its other workers would have lost the one that notes how they end."""
    client = ForkClient(tmp_path, "json", 60.0)
    await client.ensure_running()
    server = client._process
    try:
        with pytest.raises(OSError, match=r"gone/.*: No such file or directory"):
            await client.fork(tmp_path / "gone", {})
        with (
            (tmp_path / "output").open("wb") as output,
            pytest.raises(OSError, match=r"gone/.*: No such file or directory"),
        ):
            await client.run(tmp_path / "gone", "true", tmp_path, {}, output.fileno())
        await client.ensure_running()
        assert client._process is server, "no other one was started"
    finally:
        await client.close()
        await server.wait()


@pytest.mark.parametrize("kib", [100, 1000])
async def test_fork_server_runs_long_commands(tmp_path, kib):
    """The kernel delivers them in parts, and the output's descriptor with the first."""
    client = ForkClient(tmp_path, "json", 60.0)
    await client.ensure_running()
    server, home = client._process, tmp_path / "command"
    home.mkdir()
    # One variable has at most 128 KiB.
    secrets = {f"SECRET_{number}": "x" * 2**16 for number in range(kib // 64)}
    command = f"echo {'y' * 2**16} ${{#SECRET_0}}"
    try:
        with (home / "log").open("wb") as output:
            running = await client.run(home, command, tmp_path, secrets, output.fileno())
            assert await running.wait() == 0
        assert (home / "log").read_text() == f"{'y' * 2**16} {2**16}\n"
        await client.ensure_running()
        assert client._process is server, "no other one was started"
    finally:
        await client.close()
        await server.wait()
