"""What the gang reports of its workers' statuses."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agents.core.model import Event, GangExited, GangReported
from agents.daemon.clock import Clock
from agents.protocol.records import FIRST, GenerationRecord, JobId, Sealing
from agents.workers.gang import RECONNECT_S, WorkerGang
from agents.workers.process import WorkerProcess
from agents.workers.status import WorkerStatus


def no_forks() -> Any:
    """Return a client of a fork server that does nothing."""

    async def nothing() -> None: ...

    return SimpleNamespace(
        is_service=False, wait_settled=nothing, ensure_running=nothing, orphan_s=60.0,
        close=nothing,
    )  # fmt: skip


def test_failed_gang_reports_what_the_others_seal_until_they_have(tmp_path: Path):
    told: list[Event] = []
    gang = WorkerGang(tmp_path, cast("Any", None), Clock(), told.append)
    gang.job, gang.generation = JobId("j"), 3
    first, second = (
        WorkerProcess(tmp_path, cast("Any", None), {"job": "j", "generation": 3, "rank": rank})
        for rank in (0, 1)
    )
    gang.members += [first, second]

    def last(member: WorkerProcess, status: WorkerStatus) -> GangReported:
        gang._take_status(member, status)
        assert isinstance(told[-1], GangReported)
        return told[-1]

    seals = Sealing(41, 2.0)
    first.status = WorkerStatus(3, 0, "running", 41)
    assert last(second, WorkerStatus(3, 1, "running", 41, sealing=seals)).sealing == seals
    failed = last(first, WorkerStatus(3, 0, "failed", 41, failure="an exception"))
    assert (failed.taking, failed.sealing) == ("failed", seals)
    failed = last(second, WorkerStatus(3, 1, "broken", 41))
    assert (failed.taking, failed.failure, failed.sealing) == (
        "failed", "rank 0: an exception", None,
    )  # fmt: skip


async def test_a_full_disk_when_a_worker_is_reused_is_the_failure_of_the_generation(
    tmp_path, monkeypatch
):
    def full(*_: object, **__: object) -> io.BytesIO:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told: list[Event] = []
    client: Any = SimpleNamespace(check_version=lambda: None)
    gang = WorkerGang(tmp_path, client, Clock(), told.append)
    gang.job, gang.generation, gang._is_starting = JobId("j"), 3, True
    idle = WorkerProcess(
        tmp_path, cast("Any", None), {"job": "j", "generation": 2, "rank": 0, "device": 0}
    )
    monkeypatch.setattr(WorkerProcess, "is_idle", lambda _: True)
    monkeypatch.setattr("worker.atomic_file.open", full, raising=False)
    gang.members.append(idle)
    await gang.start([{"job": "j", "generation": 3, "rank": 0, "device": 0}])
    failed, ended = told
    place = tmp_path / "seat.json"
    why = f"the workers cannot be started: {place}: No space left on device; free room there"
    assert isinstance(failed, GangReported)
    assert isinstance(ended, GangExited)
    assert failed.failure == ended.failure == why


async def test_an_idle_worker_is_not_reused_for_a_generation_that_was_aborted_as_it_began(
    tmp_path, monkeypatch
):
    told: list[Event] = []
    client: Any = SimpleNamespace(check_version=lambda: None)
    gang = WorkerGang(tmp_path, client, Clock(), told.append)
    idle = WorkerProcess(
        tmp_path, cast("Any", None), {"job": "j", "generation": 2, "rank": 0, "device": 0}
    )
    monkeypatch.setattr(WorkerProcess, "is_idle", lambda _: True)
    monkeypatch.setattr(WorkerProcess, "dismiss", lambda _: gang.members.clear())
    gang.members.append(idle)
    gang.begin(GenerationRecord(JobId("j"), 3, "open", "", (), FIRST, 1, "a test"))
    gang.abort(3)
    await gang.start([{"job": "j", "generation": 3, "rank": 0, "device": 0}])
    assert isinstance(told[-1], GangExited)
    assert idle.spec["generation"] == 2


async def test_a_restarted_agent_waits_for_workers_that_it_took_over_and_not_for_ever(
    tmp_path, monkeypatch
):
    times = [100.0]
    clock: Any = SimpleNamespace(now=lambda: times[-1])
    gang = WorkerGang(tmp_path, no_forks(), clock, lambda _: None)
    silent, other = (
        WorkerProcess(tmp_path, cast("Any", None), {"job": "j", "generation": 2, "rank": rank})
        for rank in (0, 1)
    )
    monkeypatch.setattr(WorkerProcess, "dismiss", lambda _: None)
    await gang.open(None, 0, 0)
    gang.members += [silent, other]
    waiting = asyncio.create_task(gang.wait_reconnected())
    gang._take_status(other, WorkerStatus(2, 1, "idle", 4))
    await asyncio.sleep(0.02)
    assert not waiting.done(), "one is silent"
    gang._take_status(silent, WorkerStatus(2, 0, "idle", 4))
    await waiting
    silent.status = None
    times.append(times[-1] + RECONNECT_S)
    await gang.wait_reconnected()
    await gang.close(is_over=True)


PROCESS = '{"job": "j", "generation": 3, "rank": 0, "device": 0, "pid": 1, "start": 1}'


@pytest.mark.parametrize("is_reused", [False, True], ids=["new", "reused"])
@pytest.mark.parametrize("text", ["[]", "{}", '{"job": "j", "generation": 3, "rank": "x"}', "{"])
async def test_files_that_a_job_has_replaced_do_not_keep_an_agent_from_starting(
    tmp_path, text, is_reused
):
    home = tmp_path / "process" / "j.3.0"
    home.mkdir(parents=True)
    (home / "process.json").write_text(PROCESS if is_reused else text)
    if is_reused:
        (home / "seat.json").write_text(text)
    told: list[Event] = []
    gang = WorkerGang(tmp_path, no_forks(), Clock(), told.append)
    await gang.open(JobId("j"), 3, 1)
    await gang.close(is_over=True)
    (ended,) = told
    assert isinstance(ended, GangExited)
    assert gang.members == []


def test_workers_that_ended_before_are_told_oldest_first_without_those_of_this_generation(
    tmp_path: Path,
):
    gang = WorkerGang(tmp_path, cast("Any", None), Clock(), lambda _: None)
    for at, name in enumerate(("j.3.0", "j.1.0", "j.4.0", "j.4.1")):
        home = tmp_path / "process" / name
        home.mkdir(parents=True)
        os.utime(home, (at, at))
    gang.outputs[0] = tmp_path / "process" / "j.4.0" / "output"  # It has just failed.
    living = tmp_path / "process" / "j.4.1"
    gang.members.append(WorkerProcess(living, cast("Any", None), {}))
    assert [home.name for home in gang.ended_before()] == ["j.3.0", "j.1.0"]
