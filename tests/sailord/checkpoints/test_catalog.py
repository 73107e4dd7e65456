"""One operation on a job's storage at a time; one that hangs fails with the reason."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agents.protocol.records import Durable, JobId, JobRecord, Point, Saving
from sailord.checkpoints import catalog
from sailord.checkpoints.catalog import Checkpoints
from sailord.checkpoints.object_storage import Away
from sailord.core.model.commands import CollectGarbage, WriteManifest
from tests.processes import until

JOB = JobRecord(JobId("j"), "running", saving=Saving("file:///kept"))
WRITTEN = Durable(Point(3, 1), "file:///kept/j/1-3/manifest-1.json", "sha")


@pytest.mark.parametrize("hung", ["_write_manifest", "_collect_garbage"])
async def test_commit_that_waits_for_storage_that_hangs_fails_with_the_reason(monkeypatch, hung):
    """Its failure is the job's trouble, and it is tried again; nothing runs beside what hangs."""
    answers, doing = threading.Event(), []

    def hang(*_):
        doing.append("hangs")
        answers.wait()
        doing.append("answers")
        return WRITTEN

    def write(*_):
        doing.append("writes")
        return WRITTEN

    monkeypatch.setattr(catalog, "_write_manifest", write)
    monkeypatch.setattr(catalog, hung, hang)
    checkpoints = Checkpoints(("*",), write_s=0.05)
    order = WriteManifest(JOB, None, (), WRITTEN.point, None)
    sweep = asyncio.ensure_future(
        checkpoints.collect_garbage(CollectGarbage(JOB, None, WRITTEN))
        if hung == "_collect_garbage"
        else asyncio.sleep(0)
    )
    try:
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(Away, match=r"checkpoint storage has not answered for 0.05 s"):
                await checkpoints.write_manifest(order, term=1, spec="")
    finally:
        answers.set()
    await sweep
    await until(lambda: "answers" in doing)
    monkeypatch.setattr(catalog, "_write_manifest", write)
    checkpoints.write_s = 60.0
    assert await checkpoints.write_manifest(order, term=1, spec="") == WRITTEN
    assert doing == ["hangs", "answers", "writes"]
