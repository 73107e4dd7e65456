"""Sailord's notifications to systemd, its exit, and its log."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents.daemon.logs import FIELDS
from agents.store.factory import open_store
from agents.store.interface import Put, WriteUnknown
from tests.fakes.systemd import NotifySocket, notify_socket
from tests.processes import wait_until
from tests.sailord.daemon.running import ROOT, Place

PIPE_BYTES = 4096


@contextmanager
def run(place: Place, systemd: NotifySocket, output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A sailord that writes its log to a descriptor."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sailord.main", "run", "--config", place.config],
        cwd=ROOT, stderr=output, env={**os.environ, "NOTIFY_SOCKET": str(systemd.path)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_systemd_is_notified_of_ready_watchdog_and_stopping(place, tmp_path):
    log = tmp_path / "log"
    with (
        notify_socket(tmp_path) as systemd,
        log.open("wb") as out,
        run(place, systemd, out.fileno()) as head,
    ):
        systemd.wait_for("READY=1")
        # Once READY is sent, the socket, TCP and the store must answer.
        assert place.ask("GET", "/livez")[0] == 200
        assert place.status()["store"]["answers"] is True
        systemd.wait_for("WATCHDOG=1")
        head.send_signal(signal.SIGTERM)
        systemd.wait_for("STOPPING=1")
        assert head.wait(20) == 0
        assert systemd.lines.count("READY=1") == 1
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line for line in lines if not set(FIELDS) < set(line)] == []
    (leading,) = [line for line in lines if line["event"] == "elected leader"]
    assert (leading["cause"], leading["term"] > 0) == ("Elected", True)


@pytest.mark.slow
def test_stuck_event_loop_stops_feeding_the_watchdog(place, tmp_path):
    """Its log has no reader: the next line that it writes blocks it forever."""
    end, begin = os.pipe()
    fcntl.fcntl(begin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with notify_socket(tmp_path) as systemd, run(place, systemd, begin):
        systemd.wait_for("WATCHDOG=1")
        wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
        asyncio.run(spoil(place.folder / place.name / "store.sock"))
        systemd.wait_for_silence()
        os.set_blocking(end, False)

        def read_on() -> bool:
            try:
                return bool(os.read(end, 1 << 16))
            except BlockingIOError:
                return False

        wait_until(read_on)
        known = len(systemd.lines)
        wait_until(lambda: (read_on(), len(systemd.lines) > known)[1])
    os.close(end)
    os.close(begin)


async def spoil(socket: Path) -> None:
    """Write unreadable records; sailord logs each of them."""
    store = await open_store(f"unix://{socket}")
    puts = [Put(f"/sailor/v1/test/node/{i:03}", b"nothing") for i in range(100)]
    with contextlib.suppress(WriteUnknown):  # It may be stuck before it answers.
        await store.transact([], puts)
    await store.close()


def test_unexpected_exception_ends_sailord_with_a_structured_log_line():
    said = subprocess.run(
        [sys.executable, "-c",
         "from agents.daemon.logs import *\nimport logging, warnings\nbegin_log('json')\n"
         "warnings.warn('old')\nlogging.getLogger('theirs').error('%s failed', 'it')\n"
         "with log_crash():\n    assert False, 'a bug'"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 1
    lines = [json.loads(line) for line in said.stderr.splitlines()]
    assert ["old" in lines[0]["event"], lines[1]["event"]] == [True, "it failed"]
    assert (lines[2]["cause"], "a bug" in lines[2]["exception"]) == ("AssertionError", True)
    assert all(set(FIELDS) < set(line) for line in lines)


@pytest.mark.slow
def test_sailord_leaves_no_temporary_folder(place, tmp_path, monkeypatch):
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    head = place.start()
    wait_until(lambda: any(folder.glob("pymp-*/listener-*")), within_s=30.0)
    head.send_signal(signal.SIGTERM)
    assert head.wait(20) == 0
    assert list(folder.iterdir()) == []
