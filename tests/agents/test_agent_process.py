"""A real agent process with emulated workers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents.protocol.codec import decode, encode
from agents.protocol.records import Abort, Fence, KeptSteps, Order, Output
from agents.service import ALONE
from tests.agents.running import JOB, OTHER_KEY, PREFIX, ROOT, fork_servers, place
from tests.processes import until

TIMES = int(os.environ.get("EXAMPLES") or os.environ.get("SAILOR_EXAMPLES") or 3)


@pytest.mark.slow
async def test_workers_survive_a_killed_agent_and_are_taken_over(tmp_path):
    chance = random.Random(5)
    async with place(tmp_path) as here:
        agent = here.start()
        node = await here.ready()
        assert (node.gpu, node.gpus, node.zone) == ("A100-40", 2, "us-central1-b")
        await here.open(node, 1)
        await until(lambda: here.step(1) > 2)
        workers = here.workers(1)
        assert sorted(workers) == [0, 1]
        for _ in range(TIMES):
            before = here.step(1)
            agent.kill()
            agent.wait()
            await until(lambda least=before: here.step(1) > least + 2)
            agent = here.start()
            steps = here.step(1)

            async def adopted(least=steps):
                report = await here.report()
                return report and report.taking == "running" and report.step >= least

            await until(adopted)
            assert here.workers(1) == workers
            assert (await here.ready()).id == node.id
            more = steps + chance.randrange(9)
            await until(lambda least=more: here.step(1) > least)
        assert here.workers(1) == workers


@pytest.mark.slow
async def test_an_agent_that_is_long_without_a_leader_ends_its_workers_and_says_so(tmp_path):
    async with place(tmp_path) as here:
        here.more = "alone_s = 4.0\n"
        agent = here.start()
        await here.open(await here.ready(), 1)
        await until(lambda: here.step(1) > 2)
        workers = here.workers(1).values()
        await until(lambda: agent.poll() is not None)
        assert agent.returncode == ALONE
        assert "no leader has answered" in (tmp_path / "agent.log").read_text()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        assert await here.nodes() == []


@pytest.mark.slow
async def test_the_next_generation_reuses_the_processes(tmp_path):
    async with place(tmp_path) as here:
        _, node = await here.train()
        old = here.workers(1)
        await here.open(node, 2)
        await until(lambda: here.step(2) > 0)
        assert here.workers(1) == {}
        assert here.workers(2) == old, "the living processes were not reused"
        await here.open(node, 2, state="stopping", stop_at=here.step(2) + 3)
        report = await until(lambda: here.is_taking("stopped"))
        assert [seal.point.step for seal in report.sealed] == [report.step]
        written = decode(Output, (await here.ask("GET", "/v1/logs/0"))[1])
        assert written.ranks == (0, 1)
        assert "step 1\n" in written.parts[0].text
        later = (await here.ask("GET", f"/v1/logs/0?after={written.mark}"))[1]
        assert not any("step 1\n" in part.text for part in decode(Output, later).parts)
        assert (await here.ask("GET", "/v1/logs?after=../x"))[0] == 422
        assert (await here.ask("GET", f"/v1/steps/{JOB}/2/0"))[0] == 404, "none is kept"
        (here.folder / "state/generation/2/0/steps.json").write_text('{"steps": []}')
        status, body = await here.ask("GET", f"/v1/steps/{JOB}/2/0")
        assert (status, decode(KeptSteps, body).steps) == (200, ())
        for other in (f"{JOB}/1/0", f"{JOB}/2/7", "other/2/0"):
            assert (await here.ask("GET", f"/v1/steps/{other}"))[0] == 404


@pytest.mark.slow
async def test_an_abort_needs_the_key_and_the_present_term(tmp_path):
    async with place(tmp_path) as here:
        await here.train(term=7)
        workers = here.workers(1)
        old, now = (encode(Abort(JOB, Fence(term, 1))) for term in (6, 7))
        assert (await here.ask("POST", "/v1/abort", now, key=OTHER_KEY))[0] == 401
        assert (await here.ask("POST", "/v1/abort", old))[0] == 409
        assert (await here.ask("POST", "/v1/abort", b"{}"))[0] == 422
        assert (await here.ask("GET", "/v1/logs/life.json"))[0] == 404
        assert here.workers(1) == workers
        assert (await here.ask("POST", "/v1/abort", now))[0] == 200
        await until(lambda: here.is_taking("failed"))

        async def has_left():
            return b"aborted" in (await here.ask("GET", "/v1/logs/1"))[1]

        await until(has_left)
        assert here.workers(1) == workers, "idle workers were killed"


@pytest.mark.slow
async def test_an_unresponsive_worker_is_killed_and_the_failure_reported(tmp_path):
    async with place(tmp_path) as here:
        _, node = await here.train()
        os.kill(here.workers(1)[0], signal.SIGSTOP)
        os.kill(here.workers(1)[1], signal.SIGKILL)
        failed = await until(lambda: here.is_taking("failed"))
        assert failed.failure == "rank 1 was killed by signal 9"
        await here.open(node, 2)  # The next generation; the stopped worker is killed.
        await until(lambda: here.step(2) > 0)
        await until(lambda: not here.workers(1))


@pytest.mark.slow
async def test_sigterm_drains_and_sigint_leaves_the_workers(tmp_path):
    async with place(tmp_path) as here:
        agent, node = await here.train()
        workers = here.workers(1)
        agent.send_signal(signal.SIGINT)
        await until(lambda: agent.poll() is not None)
        assert agent.returncode == 0
        assert here.workers(1) == workers
        agent = here.start()
        await until(lambda: here.is_taking("running"))
        agent.send_signal(signal.SIGTERM)

        async def is_draining():
            return [one.state for one in await here.nodes()] == ["draining"]

        await until(is_draining)
        assert here.workers(1) == workers
        await here.open(node, 1, state="closed")
        await until(lambda: agent.poll() is not None)
        assert agent.returncode == 0
        assert here.workers(1) == {}
        assert await here.nodes() == []
        here.start()
        assert (await here.ready()).id != node.id


async def test_all_mistakes_of_the_configuration_are_reported_together(tmp_path):
    (tmp_path / "agent.toml").write_text('state = "s"\nlease_s = 0\nwhat = 1\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "agents.main", "run", "--config", str(tmp_path / "agent.toml")],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    for key in ("cluster_name: ", "store: ", "key: ", "lease_s: ", '"what"'):
        assert key in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
async def test_a_drain_that_does_not_end_leaves_the_workers_and_a_start_withdraws_it(tmp_path):
    async with place(tmp_path) as here:
        here.lease_s = 60.0  # The node's record outlives its agent for as long as this test looks.
        here.more = "drain_s = 0.5\n"
        agent, node = await here.train()
        workers = here.workers(1)
        agent.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(agent.wait, 60) == 1
        assert "the drain did not end in time" in (tmp_path / "agent.log").read_text()
        assert here.workers(1) == workers
        (left,) = await here.nodes()
        assert (left.id, left.state) == (node.id, "draining")
        here.start()
        assert (await here.ready()).id == node.id
        orders = [
            decode(Order, entry.value)
            for entry in (await here.store.snapshot(f"{PREFIX}intent/")).entries
        ]
        assert sorted(order.kind for order in orders) == ["preempt", "withdraw"]
        assert here.workers(1) == workers


@pytest.mark.slow
async def test_at_a_shutdown_workers_end_with_the_agent(tmp_path):
    async with place(tmp_path) as here:
        here.more = "drain_s = 0.5\n"
        agent, _ = await here.train()
        agent.send_signal(signal.SIGPWR)
        agent.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(agent.wait, 60) == 0
        await until(lambda: here.workers(1) == {})


@pytest.mark.slow
async def test_sigterm_ends_workers_only_without_an_agent(tmp_path):
    """As systemd sends it to whatever is left at a shutdown."""
    async with place(tmp_path) as here:
        agent, _ = await here.train()
        workers = here.workers(1)
        (server,) = fork_servers(tmp_path) - set(workers.values())
        os.kill(server, signal.SIGTERM)
        before = here.step(1)
        await until(lambda: here.step(1) > before + 3)
        assert here.workers(1) == workers
        agent.kill()
        agent.wait()
        os.kill(server, signal.SIGTERM)
        await until(lambda: here.workers(1) == {} and not fork_servers(tmp_path))


@pytest.mark.slow
async def test_check_reports_all_problems_and_needs_no_agent(tmp_path):
    config = tmp_path / "agent.toml"
    config.write_text(
        'cluster_name = "c"\nname = "a"\nstate = "s"\nstore = "unix:///s"\nkey = "key"\n'
        'emulate = "2xA1000"\n'
    )
    command = [sys.executable, "-m", "agents.main", "check", "--config", str(config)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the cluster's key cannot be read" in done.stderr
    assert "error: emulate: " in done.stderr
    (tmp_path / "key").write_text("k" * 64)
    (tmp_path / "key").chmod(0o600)
    config.write_text(config.read_text().replace("A1000", "A100-40"))
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 x A100-40, emulated; the store is unix:///s" in done.stdout
    assert not (tmp_path / "s").exists()
