"""A real agent under systemd: notifications, exit and log."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from agents.daemon.logs import FIELDS
from tests.agents.running import ROOT, kill_fork_servers, place
from tests.fakes.systemd import notify_socket
from tests.processes import until


async def test_ready_is_sent_once_the_node_is_registered(tmp_path):
    async with place(tmp_path) as here:
        (tmp_path / "store.sock").rename(tmp_path / "later.sock")
        with notify_socket(tmp_path) as systemd:
            here.environment["NOTIFY_SOCKET"] = str(systemd.path)
            agent = here.start()
            # While the store is down, it extends the timeout and is not ready.
            for _ in range(3):
                await asyncio.to_thread(systemd.wait_for, "EXTEND_TIMEOUT_USEC=")
            assert not {"READY=1", "WATCHDOG=1"} & set(systemd.lines)
            assert await here.nodes() == []
            (tmp_path / "later.sock").rename(tmp_path / "store.sock")
            await asyncio.to_thread(systemd.wait_for, "READY=1")
            assert len(await here.nodes()) == 1
            await asyncio.to_thread(systemd.wait_for, "WATCHDOG=1")
            assert systemd.lines.count("READY=1") == 1
            agent.send_signal(signal.SIGTERM)
            await asyncio.to_thread(systemd.wait_for, "STOPPING=1")
            await until(lambda: agent.poll() is not None)
            assert agent.returncode == 0


HANGING_DISK = """
import os
sync = os.fsync
def fsync(file):
    if os.path.exists({stuck!r}):
        open({stuck!r}).read()
    sync(file)
os.fsync = fsync
"""
"""Writes to the disk hang while this FIFO is there."""


@pytest.mark.slow
async def test_a_stuck_loop_does_not_feed_the_watchdog(tmp_path):
    async with place(tmp_path) as here:
        with notify_socket(tmp_path) as systemd:
            stuck = tmp_path / "stuck"
            (tmp_path / "sitecustomize.py").write_text(HANGING_DISK.format(stuck=str(stuck)))
            here.environment |= {"NOTIFY_SOCKET": str(systemd.path), "PYTHONPATH": str(tmp_path)}
            agent = here.start()
            node = await here.ready()
            await asyncio.to_thread(systemd.wait_for, "WATCHDOG=1")
            # The disk hangs, and with it the loop, which writes its state before it acts.
            os.mkfifo(stuck)
            await here.open(node, 1)
            await asyncio.to_thread(systemd.wait_for_silence)
            # systemd's SIGABRT ends it, and the next agent process takes over.
            agent.send_signal(signal.SIGABRT)
            await until(lambda: agent.poll() is not None)
            assert agent.returncode == -signal.SIGABRT
            stuck.unlink()
            here.start()
            await asyncio.to_thread(systemd.wait_for, "READY=1")
            await until(lambda: here.step(1) > 0)


@pytest.mark.slow
async def test_stopping_is_sent_at_once_and_workers_finish_first(tmp_path):
    async with place(tmp_path) as here:
        with notify_socket(tmp_path) as systemd:
            here.environment["NOTIFY_SOCKET"] = str(systemd.path)
            agent, node = await here.train()
            workers = here.workers(1)
            agent.send_signal(signal.SIGTERM)
            await asyncio.to_thread(systemd.wait_for, "STOPPING=1")
            await until(lambda: any(x.startswith("STATUS=draining") for x in systemd.lines))
            # While it drains, it feeds the watchdog and its workers go on.
            await asyncio.to_thread(systemd.wait_for, "WATCHDOG=1")
            before = here.step(1)
            await until(lambda: here.step(1) > before + 3)
            assert here.workers(1) == workers
            stop_at = here.step(1) + 3
            await here.open(node, 1, state="stopping", stop_at=stop_at)
            await until(lambda: here.step(1) >= stop_at)
            assert here.workers(1) == workers  # Parked with their snapshots.
            assert agent.poll() is None
            await here.open(node, 1, state="closed")
            await until(lambda: agent.poll() is not None)
            assert (agent.returncode, here.workers(1)) == (0, {})


async def test_every_log_line_has_the_context_fields(tmp_path):
    async with place(tmp_path) as here:
        _, node = await here.train(term=3)
        await until(lambda: "joining generation 1" in (tmp_path / "agent.log").read_text())
        lines = [json.loads(line) for line in (tmp_path / "agent.log").read_text().splitlines()]
        assert [line for line in lines if not set(FIELDS) < set(line)] == []
        about = next(line for line in lines if "joining generation 1" in line["event"])
        assert (about["job"], about["generation"], about["term"]) == ("job", 1, 3)
        assert (about["node"], about["step"], about["cause"]) == (node.id, 0, "GenerationRead")


async def test_the_log_on_a_terminal_is_text(tmp_path):
    """No JSON is written to a terminal."""
    (tmp_path / "key").write_text("k" * 64)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "agent.toml").write_text(
        'cluster_name = "c"\nstate = "s"\nkey = "key"\nstore = "unix:///nowhere"\nzone = "z"\n'
        "orphan_s = 1.0\n"
        "[listen]\nport = 0\n"
    )
    ours, theirs = pty.openpty()
    agent = subprocess.Popen(
        [sys.executable, "-m", "agents.main", "run", "--emulate", "1xT4",
         "--config", tmp_path / "agent.toml"],
        cwd=ROOT, stderr=theirs, env={**os.environ, "GCE_METADATA_HOST": "127.0.0.1:9"},
    )  # fmt: skip
    os.close(theirs)
    try:
        text = ""
        while "SelfTested" not in text:
            text += (await asyncio.to_thread(os.read, ours, 4096)).decode()
        # The text, and the event that caused it.
        assert '"event"' not in text
        assert "registering" in text
    finally:
        agent.kill()
        agent.wait()
        kill_fork_servers(tmp_path)
        os.close(ours)
