"""Free memory is the least of the machine's and of what a container leaves; freed pages go back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from worker.host_memory import free_host_bytes

FRAGMENTS = """
import ctypes
from pathlib import Path
from worker.host_memory import return_freed_memory
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def touched(size):
    ctypes.memset(place := c.malloc(size), 1, size)
    return place
pairs = [(touched(100_000), touched(5_000)) for _ in range(640)]
for large, _ in pairs:
    c.free(large)
before = resident()
return_freed_memory()
print(before - resident())
"""
"""Frees 64 MB between small pieces that stay, and prints what the system got back."""
HEAPS = """
import threading
from pathlib import Path
from worker.control.preload import preload
preload()
gate = threading.Barrier(9)
def work():
    piece = bytearray(50_000)
    gate.wait()
    gate.wait()
for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
gate.wait()
lines = map(str.split, Path("/proc/self/maps").read_text().splitlines())
begins = [place.split("-")[0] for place, kind, *rest in lines if kind == "rw-p" and len(rest) == 3]
print(sum(int(each, 16) % 2**26 == 0 for each in begins))
gate.wait()
"""
"""Prints how many heaps eight threads add to the first; each begins at a multiple of 64 MiB, where
other memory begins but by chance."""


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such call")
def test_freed_pages_between_pieces_in_use_go_back_to_the_system():
    code = [sys.executable, "-c", FRAGMENTS]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 32_000_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no heaps")
def test_threads_of_a_worker_share_two_heaps():
    done = subprocess.run([sys.executable, "-c", HEAPS], capture_output=True, text=True, check=True)
    assert 1 <= int(done.stdout) < 4, "by default there are eight"
