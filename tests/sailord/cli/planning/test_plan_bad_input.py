"""What ``plan`` answers where there is nothing to plan, or hardly anything: sentences that help."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sailord.cli.main import main

SMALL = 'family = "llama"\nlayers = {layers}\nhidden = 256\nheads = 4\nvocab = 512'
LARGE = 'preset = "opt-30b"'
POOL = """
[[pool]]
zone = "{zone}"
gpu = "{gpu}"
gpus_per_machine = {gpus}
gpus = {gpus}
{more}
"""
PLANNERS = ("sailor", "sailor-paper", "whale")


def run(
    folder: Path,
    *options: str,
    pools: str,
    model: str = SMALL.format(layers=2),
    batch: int = 8,
    objective: str = "",
    max_tp: int = 2,
) -> Result:
    job, cluster = folder / "job.toml", folder / "cluster.toml"
    job.write_text(
        f"[model]\n{model}\n[training]\nglobal_batch = {batch}\nsequence = 512\n"
        f"max_tp = {max_tp}\n"
        f"[objective]\n{objective}\n",
        encoding="utf-8",
    )
    cluster.write_text(pools, encoding="utf-8")
    result = CliRunner().invoke(main, ["plan", str(job), str(cluster), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert (result.exit_code == 0) == bool(result.stdout)
    return result


def pool(gpu: str, gpus: int, *, zone: str = "us-central1-a", more: str = "") -> str:
    return POOL.format(zone=zone, gpu=gpu, gpus=gpus, more=more)


def test_an_empty_cluster_or_pool_is_refused_with_a_cure(tmp_path: Path) -> None:
    for pools in ("", "pool = []", pool("T4", 1).replace("gpus = 1", "gpus = 0")):
        result = run(tmp_path, pools=pools)
        assert result.exit_code == 2
        assert "cluster.toml" in result.stderr
        assert ";" in result.stderr, "the cure follows the mistake"


def test_a_budget_of_a_job_without_an_end_is_not_checked_and_that_is_told(tmp_path: Path) -> None:
    pools, budget = pool("A100-40", 1), "max_usd_total = 0.0001"
    result = run(tmp_path, "--budget", "1", pools=pools, objective=budget)
    told = "note: objective.max_usd_total is not checked: training.steps is not given"
    assert result.exit_code == 0
    assert told in result.stderr


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_cluster_without_running_gpus_is_refused(tmp_path: Path, planner: str) -> None:
    pools = pool("T4", 1, more="obtainable = 4").replace("gpus = 1", "gpus = 0")
    result = run(tmp_path, "--planner", planner, pools=pools)
    assert result.exit_code in (1, 2)
    assert result.stderr


def test_a_pool_without_running_gpus_does_not_affect_others(tmp_path: Path) -> None:
    none = pool("A100-40", 1, zone="us-central1-b", more="obtainable = 4")
    pools = pool("A100-40", 2) + none.replace("gpus = 1", "gpus = 0")
    assert run(tmp_path, pools=pools).exit_code == 0


def test_a_gpu_that_is_too_small_gets_a_suggestion(tmp_path: Path) -> None:
    result = run(tmp_path, pools=pool("T4", 1), model=LARGE)
    assert result.exit_code == 1
    assert "opt-30b does not fit on the 1 GPUs" in result.stderr
    assert "GB" in result.stderr
    # Deeper pipelines than any draft has are found as well.
    assert "it fits on 64 such GPUs" in result.stderr
    nearly = run(tmp_path, pools=pool("T4", 1), model='preset = "opt-1.3b"')
    assert nearly.exit_code == 1
    assert "it fits on" in nearly.stderr


def test_larger_tp_is_a_cure_only_where_the_model_then_fits(tmp_path: Path) -> None:
    wide = 'family = "llama"\nlayers = 1\nhidden = 12288\nheads = 96\nvocab = 512'
    helped = run(tmp_path, pools=pool("T4", 8), model=wide, max_tp=1)
    assert "set training.max_tp = 8, with which it fits" in helped.stderr
    six = wide.replace("heads = 96", "heads = 6\nffn = 32256")
    helped = run(tmp_path, pools=pool("T4", 8), model=six, max_tp=1)
    assert "set training.max_tp = 6, with which it fits" in helped.stderr
    hopeless = run(tmp_path, pools=pool("T4", 8), model='preset = "opt-30b"', max_tp=1)
    assert "does not fit" in hopeless.stderr
    assert "max_tp" not in hopeless.stderr


def test_contradicting_limits_are_reported_with_the_needed_change(tmp_path: Path) -> None:
    priced = pool("A100-40", 8, more="price_usd_per_gpu_hour = 3.0")
    limits = "max_usd_per_hour = 0.5\nmin_iterations_per_s = 1000"
    result = run(tmp_path, pools=priced, objective=limits)
    assert result.exit_code == 1
    assert "objective.max_usd_per_hour: is 0.5" in result.stderr
    assert "raise it by 500%" in result.stderr
    assert "objective.min_iterations_per_s" in result.stderr
    assert "lower it to" in result.stderr


@pytest.mark.parametrize("planner", PLANNERS[:2])
def test_few_layers_and_a_batch_of_one_are_planned(tmp_path: Path, planner: str) -> None:
    """Three layers on eight GPUs, then a single sample: most GPUs stay idle."""
    pools, model = pool("A100-40", 8), SMALL.format(layers=1)
    assert run(tmp_path, "--planner", planner, pools=pools, model=model).exit_code == 0
    assert run(tmp_path, "--planner", planner, pools=pools, model=model, batch=1).exit_code == 0


@pytest.mark.parametrize("planner", PLANNERS)
def test_without_prices_only_throughput_can_be_optimised(tmp_path: Path, planner: str) -> None:
    own_zone = '[[zone]]\nname = "here"\nregion = "home"\n'
    pools = own_zone + pool("RTX-3090", 2, zone="here")
    refused = run(tmp_path, "--planner", planner, pools=pools, objective='goal = "cost"')
    assert refused.exit_code == 2
    assert "no price is known for RTX-3090@here" in refused.stderr
    assert "price_usd_per_gpu_hour" in refused.stderr
    went_on = run(tmp_path, "--planner", planner, pools=pools)
    assert went_on.exit_code == 0
    assert "cost        unknown" in went_on.stdout


@pytest.mark.parametrize("option", [("--allow", "interleaved"), ("--gap", "0.1")])
def test_options_of_our_planner_are_refused_beside_another(tmp_path: Path, option) -> None:
    result = run(tmp_path, "--planner", "varuna", *option, pools=pool("T4", 2))
    assert result.exit_code == 2
    assert f"{option[0]}: is for our planner only; leave --planner out" in result.stderr
