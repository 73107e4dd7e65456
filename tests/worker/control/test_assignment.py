"""What a rank does as its agent assigns it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker.checkpoint.capacity_check import DevicePeak
from worker.checkpoint.piece_sources import STORAGE_TIMEOUT_S, PeerSource
from worker.control.assignment import Assignment, RestorePoint

BY_AGENT = {"name": "a", "address": "127.0.0.1:1", "path": "/v1/checkpoint/job/mac/name"}


def spec_in(folder: Path) -> dict[str, Any]:
    return {
        "job": "job", "generation": 2, "rank": 0, "ranks": 1, "threads": 1, "host": "127.0.0.1",
        "folder": str(folder / "2" / "0"), "memory": str(folder), "node": "a.1.1", "term": 1,
        "device": 0, "device_type": "cpu", "memory_every": 1, "persist_every": 1,
        "restore": {"step": 3, "generation": 1, "source": "durable"},
        "peers": {}, "ticket": "t", "checkpoint": BY_AGENT,
    }  # fmt: skip


def test_an_agent_that_reads_the_storage_for_a_rank_is_given_time(tmp_path: Path) -> None:
    (source,) = Assignment(spec_in(tmp_path)).sources()[-1]
    assert isinstance(source, PeerSource)
    assert (source.node, source.timeout_s) == ("a", STORAGE_TIMEOUT_S)


def test_what_a_newer_agent_adds_to_an_assignment_is_passed_over(tmp_path: Path) -> None:
    """Workers keep their code until their node drains, and agents are replaced beside them."""
    spec = spec_in(tmp_path)
    spec["restore"]["added"] = 1
    spec["peers"] = {"b.1.1": {"name": "b", "address": "b:1", "zone": "z", "added": 1}}
    added = {
        "peak": {"tensors": 5, "context": 6, "added": 1},
        "reader": {"grant": "", "secret": "", "added": 1},
        "added": 1,
    }
    assignment = Assignment({**spec, **added})
    assert assignment.restore == RestorePoint(3, 1, "durable")
    assert assignment.peak == DevicePeak(5, 6)
    assert [len(group) for group in assignment.sources()] == [1, 0, 1, 1]


def test_a_generation_needs_its_restore_point_and_the_fallback_of_past_ones(tmp_path: Path) -> None:
    """All of them, if an older agent or leader does not say which."""
    spec = spec_in(tmp_path)
    assert Assignment(spec).snapshot_target.needed is None
    spec["fallback"] = {"step": 2, "generation": 1, "added": 1}
    assert Assignment(spec).snapshot_target.needed == {(1, 3), (1, 2)}
