"""`make gpu-check` runs on a CPU, too, and its parts do not affect each other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.page import page_of
from benchmarks.gpu_check.setting import SkippedError, attempt

ROOT = gpu_check.ROOT


def test_page_lists_skipped_and_failed_parts():
    parts = {
        "machine": {"state": "done", "seconds": 1.0, "found": {"cores": 2, "NCCL": None}},
        "kernels": {"state": "failed", "why": "did not end within 70 s: it hung", "seconds": 70.0},
        "snapshots": {"state": "skipped", "why": "missing packages: pip install xxhash"},
        "transport": {
            "state": "done",
            "seconds": 2.0,
            "found": {"one_rank": "skipped: NCCL needs a GPU", "all_ranks": [{"step_s": 0.25}]},
        },
    }
    found = {"date": "2026-01-02", "device": "1 x X", "quick": False, "seconds": 73, "parts": parts}
    page = page_of(found)
    assert "| kernels | failed: did not end within 70 s: it hung |" in page
    assert "Skipped: missing packages: pip install xxhash" in page
    assert "| transport | done in 2 s; one rank: skipped: NCCL needs a GPU |" in page
    assert "| all ranks 0, step s | 0.25 |" in page


def test_missing_packages_are_named_as_pip_knows_them(tmp_path, monkeypatch):
    there = gpu_check.is_there
    monkeypatch.setattr(gpu_check, "is_there", lambda name: name not in {"grpc"} and there(name))
    found = gpu_check.run_part("recovery", "cpu", True, tmp_path, 60.0)
    assert found == {"state": "skipped", "why": "missing packages: pip install grpcio"}


def test_a_failed_figure_does_not_affect_the_others():
    def fails():
        raise RuntimeError("CUDA error: no kernel image\nmore")

    def skips():
        raise SkippedError("one GPU")

    assert attempt(fails) == "failed: RuntimeError: CUDA error: no kernel image"
    assert attempt(skips) == "skipped: one GPU"
    assert attempt(lambda: __import__("no_such_package")) == (
        "skipped: the package no_such_package is missing"
    )


def test_part_that_hangs_is_ended_and_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_check.LIMITS_S, "machine", 0.2)
    monkeypatch.setattr(gpu_check, "LIMIT_LEAST_S", 0.0)
    found = gpu_check.run_part("machine", "cpu", True, tmp_path, 60.0)
    assert found["state"] == "failed"
    assert found["why"].startswith("did not end within 0 s")


def test_part_whose_time_is_over_cleans_up(tmp_path, monkeypatch):
    part = """
import pathlib, sys, time
try:
    time.sleep(60)
finally:
    pathlib.Path(sys.argv[-1], "cleaned up").touch()
"""
    (tmp_path / "benchmarks/gpu_check").mkdir(parents=True)
    (tmp_path / "benchmarks/gpu_check/part.py").write_text(part)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setitem(gpu_check.LIMITS_S, "machine", 4.0)
    monkeypatch.setattr(gpu_check, "LIMIT_LEAST_S", 0.0)
    gpu_check.run_part("machine", "cpu", True, tmp_path, 60.0)
    assert (tmp_path / "cleaned up").exists()


BARE = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Bare())
import benchmarks.gpu_check.machine, benchmarks.gpu_check.kernels
import benchmarks.gpu_check.training, benchmarks.gpu_check.transport
"""


@pytest.mark.slow
def test_most_parts_need_torch_and_numpy_only():
    blocked = {"safetensors", "xxhash", "structlog", "pynvml", "etcd3", "yaml", "msgspec"}
    blocked |= {each.split(".")[0] for each in gpu_check.CLUSTER.split()}
    words = [sys.executable, "-c", BARE.format(blocked=blocked)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.at_length
def test_whole_check_runs_on_a_cpu(tmp_path):
    words = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert {name: part["state"] for name, part in found["parts"].items()} == dict.fromkeys(
        gpu_check.LIMITS_S, "done"
    ), done.stdout
    training = found["parts"]["training"]["found"]
    assert training["runtime"]["first_and_last_loss"] == pytest.approx(
        training["plain_loop"]["first_and_last_loss"], rel=0.01
    )
    ranks = found["parts"]["transport"]["found"]["all_ranks"]
    assert all(each["names_the_killed_rank"] for each in ranks["survivors_say"])
    assert ranks["gathers_and_sums_of_parts_are_right"]
    assert ranks["two_ranks_share_tokens"]["loss"] == pytest.approx(
        ranks["two_ranks_split_layers"]["loss"], rel=1e-4
    )
    deaths = found["parts"]["deaths"]["found"]
    assert deaths["totals"]["deaths"] > 0
    assert deaths["unexpected"] == []
    assert found["parts"]["recovery"]["found"]["kill_a_rank"]["new_generation"]
    assert found["parts"]["recovery"]["found"]["kill_a_node"]["new_generation"]
    assert not found["parts"]["recovery"]["found"]["kill_the_agent"]["new_generation"]
    text = (tmp_path / "gpu-check.md").read_text()
    assert "failed" not in text.replace("memory-efficient: failed", "").replace(
        "memory-efficient | failed", ""
    )
