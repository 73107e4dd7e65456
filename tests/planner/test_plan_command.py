"""The command ``plan``: what it prints, what it saves, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from sailord.cli import main

JOB = """
[model]
family = "llama"
layers = 4
hidden = 256
heads = 4
vocab = 512
[training]
global_batch = 8
sequence = 128
max_tp = 2
[objective]
{objective}
"""
CLUSTER = """
[[pool]]
zone = "us-central1-a"
gpu = "A100-40"
gpus_per_machine = 2
gpus = 4
price_usd_per_gpu_hour = 3.0
"""


def run(folder: Path, *options: str, objective: str = "") -> Result:
    job, cluster = folder / "job.toml", folder / "cluster.toml"
    job.write_text(JOB.format(objective=objective), encoding="utf-8")
    cluster.write_text(CLUSTER, encoding="utf-8")
    return CliRunner().invoke(main, ["plan", str(job), str(cluster), *options])


def test_it_prints_a_plan_with_its_estimate_and_how_sure_it_is(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    result = run(tmp_path, "--json", "--save", str(saved))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["estimate"]["estimator"] == "event"
    assert document["estimate"]["throughput_samples_per_s"] > 0
    assert (
        sum(p["micro_batches"] for p in document["plan"]["pipelines"])
        * document["plan"]["micro_batch_size"]
        == 8
    )
    assert {"seconds", "evaluations", "lower_bound_s", "gap"} <= set(document["search"])
    assert 0 <= document["search"]["gap"] < 1
    assert sum(document["gpus_used"].values()) <= 4
    assert json.loads(saved.read_text(encoding="utf-8")) == document["plan"]
    again = CliRunner().invoke(
        main,
        [
            "simulate",
            str(saved),
            str(tmp_path / "job.toml"),
            str(tmp_path / "cluster.toml"),
            "--json",
        ],
    )
    assert again.exit_code == 0
    assert json.loads(again.stdout)["iteration_s"] == document["estimate"]["iteration_s"]


def test_people_get_a_table_and_the_reasons(tmp_path: Path) -> None:
    result = run(tmp_path, "--explain")
    assert result.exit_code == 0
    assert "bottleneck" in result.output
    assert "no plan is better than" in result.output


def test_no_plan_says_which_limit_to_relax(tmp_path: Path) -> None:
    result = run(tmp_path, objective="max_usd_per_iteration = 1e-12")
    assert result.exit_code == 1
    assert "max_usd_per_iteration" in result.stderr
    assert result.stdout == ""


def test_unknown_names_are_mistakes(tmp_path: Path) -> None:
    assert run(tmp_path, "--estimator", "nobody").exit_code == 2
    assert run(tmp_path, "--planner", "nobody").exit_code == 2
    assert run(tmp_path, "--estimator", "paper").exit_code == 2
