"""Free memory is the least of the machine's and of what a container's limit leaves."""

from __future__ import annotations

import pytest

from worker.host_memory import free_host_bytes


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [
        *[(None, 0, 4096), ("max", 900, 4096), ("9000", 900, 4096)],
        *[("1000", 900, 150), ("1000", 1049, 1), ("1000", 1060, 0)],
    ],
)
def test_a_containers_limit_leaves_what_is_not_used_or_only_cached(tmp_path, limit, used, left):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        kinds = {"anon": 700, "file": 150, "shmem": 100, "inactive_file": 30, "active_file": 20}
        (tmp_path / "memory.stat").write_text("".join(f"{k} {n}\n" for k, n in kinds.items()))
    assert free_host_bytes(tmp_path / "meminfo", tmp_path) == left
