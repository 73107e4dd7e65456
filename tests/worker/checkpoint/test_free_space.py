"""Room for snapshots in memory is no more than the memory that is left."""

from __future__ import annotations

from worker.checkpoint import free_space
from worker.checkpoint.free_space import free_bytes


def test_a_folder_in_memory_is_bounded_by_what_the_host_has_left(tmp_path, monkeypatch):
    monkeypatch.setattr(free_space, "free_host_bytes", lambda: 5)
    monkeypatch.setattr(free_space, "_is_in_memory", lambda _: True)
    assert free_bytes(tmp_path) == 5
    monkeypatch.setattr(free_space, "_is_in_memory", lambda _: False)
    assert free_bytes(tmp_path) != 5
