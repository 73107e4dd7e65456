"""What the gang reports of its workers' statuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from agents.core.model import Event, GangReported
from agents.daemon.clock import Clock
from agents.protocol.records import JobId, Sealing
from agents.workers.gang import WorkerGang
from agents.workers.process import WorkerProcess
from agents.workers.status import WorkerStatus


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
