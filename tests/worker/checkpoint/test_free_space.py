"""Room for snapshots: in a container, what its limit leaves."""

from __future__ import annotations

import sys

import pytest

from worker.checkpoint import free_space
from worker.checkpoint.free_space import free_bytes, left_in_container


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [("max", 900, sys.maxsize), ("1000", 900, 150), ("1000", 1049, 1), ("1000", 1060, 0)],
)
def test_a_containers_limit_leaves_what_is_not_used_or_only_cached(tmp_path, limit, used, left):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    kinds = {"anon": 700, "file": 150, "shmem": 100, "inactive_file": 30, "active_file": 20}
    (tmp_path / "memory.stat").write_text("".join(f"{k} {n}\n" for k, n in kinds.items()))
    assert left_in_container(tmp_path) == left


def test_outside_of_a_container_nothing_is_limited(tmp_path):
    assert left_in_container(tmp_path) == sys.maxsize


def test_a_folder_in_memory_is_bounded_by_the_limit_of_its_container(tmp_path, monkeypatch):
    monkeypatch.setattr(free_space, "left_in_container", lambda: 5)
    monkeypatch.setattr(free_space, "_is_in_memory", lambda _: True)
    assert free_bytes(tmp_path) == 5
    monkeypatch.setattr(free_space, "_is_in_memory", lambda _: False)
    assert free_bytes(tmp_path) != 5
