"""The contest with published planners: its questions, its file, and what it counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contest import main, random_case, ratio_of, read, shape_of, summary

SPLIT = {
    "layers": [0, 2], "tp": 1, "recompute": "none", "split": [1, 1],
    "places": [{"gpu": "T4", "zone": "a"}, {"gpu": "L4", "zone": "b"}],
}  # fmt: skip
SPLIT_PLAN = {"micro_batch_size": 2, "pipelines": [{"micro_batches": 4, "stages": [SPLIT]}] * 2}


def case(ours: float | None, *values: float, plan: Any = None) -> dict[str, Any]:
    by_name = {f"planner {n}": value for n, value in enumerate(values)}
    return {"ours": {"value": ours}, "published": {"values": by_name, "plan": plan}}


def test_a_case_depends_on_its_seed_and_size_only() -> None:
    sizes = set()
    for seed in range(40):
        (name, one), (again, other) = random_case(seed, 128), random_case(seed, 128)
        assert (name, one.job, one.cluster.pools) == (again, other.job, other.cluster.pools)
        kinds = {pool.gpu for pool in one.cluster.pools}
        assert 2 <= len(kinds) <= 4
        assert 1 <= len({pool.zone for pool in one.cluster.pools}) <= 5
        sizes.add(sum(pool.gpus for pool in one.cluster.pools))
    assert min(sizes) < 16
    assert max(sizes) > 64


def test_of_two_lines_of_a_case_the_last_counts(tmp_path: Path) -> None:
    file = tmp_path / "cases"
    lines = [{"seed": 1, "a": 1}, {"seed": 2, "a": 2}, {"seed": 1, "a": 3}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert {seed: one["a"] for seed, one in read(file).items()} == {1: 3, 2: 2}
    assert read(tmp_path / "none") == {}


def test_file_of_other_questions_is_refused(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "cases"
    file.write_text(json.dumps({"seed": 0, "gpus_max": 512, "parts": 24}) + "\n")
    for options, told in (
        (["--gpus-max", "128"], "--gpus-max 512"),
        (["--parts", "1"], "--parts 24"),
    ):
        monkeypatch.setattr("sys.argv", ["contest", str(file), "--cases", "1", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert f"holds cases of {told}" in capsys.readouterr().err


def test_a_plan_that_only_others_find_is_a_loss() -> None:
    ours = [case(1.0, 2.0, 4.0), case(2.0, 2.0), case(3.0, 2.0, plan=SPLIT_PLAN)]
    none = [case(None), case(1.0), case(None, 2.0)]
    assert [ratio_of(one) for one in ours + none] == [0.5, 1.0, 1.5, None, 0.0, math.inf]
    row = summary("all", ours + none)
    assert row == ["all", "6", "2", "1", "1", "2", "1", "1", "1.0000", "inf"]


def test_a_plan_is_shown_with_its_split_stages() -> None:
    shown = shape_of(SPLIT_PLAN)
    assert shown == "micro batch 2, together None: 2 x 4 micro batches, T4@a+L4@b tp 1 layers 0-1"
