"""The measurement of what checkpoints cost."""

from __future__ import annotations

import multiprocessing

import pytest

pytest.importorskip("torch")
from benchmarks import checkpoint


def test_each_snapshot_of_each_rank_is_written_to_a_place_of_its_own(monkeypatch, tmp_path):
    places = []
    monkeypatch.setattr(checkpoint, "_persist", lambda _memory, _step, to: places.append(to))
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        for said in ((0, 1), (0, 2), (1, 1), {"bytes": 8}):
            theirs.send(said)
        assert checkpoint._serve([ours], tmp_path, tmp_path) == {"bytes": 8}
        assert [theirs.recv() for _ in range(3)] == ["done"] * 3
    assert len(set(places)) == 3
