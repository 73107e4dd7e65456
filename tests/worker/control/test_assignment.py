"""What a rank does as its agent assigns it."""

from __future__ import annotations

from pathlib import Path

from worker.checkpoint.fetch import STORAGE_TIMEOUT_S, PeerSource
from worker.control.assignment import Assignment


def test_an_agent_that_reads_the_storage_for_a_rank_is_given_time(tmp_path: Path) -> None:
    by_agent = {"name": "a", "address": "127.0.0.1:1", "path": "/v1/checkpoint/job/mac/name"}
    spec = {
        "job": "job", "generation": 2, "rank": 0, "ranks": 1, "threads": 1, "host": "127.0.0.1",
        "folder": str(tmp_path / "2" / "0"), "memory": str(tmp_path), "node": "a.1.1", "term": 1,
        "device": 0, "device_type": "cpu", "memory_every": 1, "persist_every": 1,
        "restore": {"step": 3, "generation": 1, "source": "durable"},
        "peers": {}, "ticket": "t", "checkpoint": by_agent,
    }  # fmt: skip
    (source,) = Assignment(spec).sources()[-1]
    assert isinstance(source, PeerSource)
    assert (source.node, source.timeout_s) == ("a", STORAGE_TIMEOUT_S)
