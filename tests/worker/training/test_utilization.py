"""Model FLOPs utilization: counted without recomputation, left out where peaks are not known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from simulator.hardware.catalogue import load_catalogue
from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.worker.training_runs import alone, small_job, trained
from worker.training.utilization import model_flops, peak_flops, seconds_at_peak

A100, V100 = "NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB"


def plan_on(*kinds: str, tp: int = 1) -> Plan:
    stages = [(Stage((0, 5), tp, (Place(kind, "m", "z"),)),) for kind in kinds]
    return Plan(1, tuple(Pipeline(1, stage) for stage in stages))


def test_a_large_model_takes_six_flops_per_parameter_and_token():
    model = build_model("llama", layers=4, hidden=1024, heads=16, vocab=1000, sequence=64)
    job = Job("job", model, global_batch=8, sequence=64)
    matrices = sum(layer.parameters() for layer in model.layers[1:])
    assert model_flops(job) / (6 * matrices * 8 * 64) == pytest.approx(1, rel=0.05)
    assert model_flops(replace(job, recompute="full")) == model_flops(job)


def test_frozen_weights_need_no_gradients():
    job = small_job()
    layers = tuple(
        replace(layer, tensors=tuple(replace(t, frozen=True) for t in layer.tensors))
        for layer in job.model.layers
    )
    frozen = replace(job, model=replace(job.model, layers=layers))
    assert model_flops(frozen) == pytest.approx(2 / 3 * model_flops(job))


def test_peaks_are_summed_over_the_plans_gpus():
    gpus = load_catalogue().gpus
    each = gpus["A100-40"].peak_flops["fp16"], gpus["V100-16"].peak_flops["fp16"]
    mixed = plan_on("A100-40", "V100-16", tp=2)
    assert peak_flops(mixed, "fp16", own=V100) == 2 * sum(each)
    assert peak_flops(plan_on("any", "any"), "fp16", own=A100) == 2 * each[0]
    chunks = (*mixed.pipelines[0].stages, *mixed.pipelines[1].stages) * 2
    interleaved = Plan(1, (Pipeline(2, chunks),), "interleaved", 2)
    assert peak_flops(interleaved, "fp16", own=V100) == 2 * sum(each)


@pytest.mark.parametrize(
    ("kinds", "precision", "own"),
    [
        (["A100-40", "V100-16"], "bf16", A100),  # A V100 has no bf16.
        (["A100-40"], "fp16", V100),  # The plan is of other GPUs than those that it runs on.
        (["mine"], "fp16", A100),
        (["any"], "fp16", "A GPU of next year"),
    ],
)
def test_an_unknown_peak_gives_none(kinds, precision, own):
    assert peak_flops(plan_on(*kinds), precision, own=own) is None


def test_processors_have_no_utilization():
    job = small_job()
    assert seconds_at_peak(job, alone(job), torch.device("cpu")) is None
    (report,) = trained(job, alone(job)).reports
    assert "mfu" not in report.figures()
    assert replace(report, at_peak_s=0.5, seconds=2.0).line()["mfu"] == 0.25
