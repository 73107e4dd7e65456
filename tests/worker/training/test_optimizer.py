"""The optimizer against torch's, its bit-equality at any offset, and the learning rate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from simulator.spec.job import ParameterGroup, UpdateSettings
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.worker.training_runs import HERE, drawn, plan_of, small_job
from worker.training.optimizer import OptimizerStep, clip_factor, is_fused, learning_rate


def numbers(count: int, *, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(count, generator=generator, dtype=dtype) for _ in range(4)]


TORCHS = {
    "adam": (torch.optim.Adam, {}),
    "adam with decay": (torch.optim.Adam, {"weight_decay": 0.2}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.01}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd with decay": (torch.optim.SGD, {"weight_decay": 0.2, "momentum": 0.0}),
    "nesterov": (torch.optim.SGD, {"weight_decay": 0.2, "momentum": 0.9, "nesterov": True}),
}
"""Optimizers of torch, and settings that we write alike."""


@pytest.mark.parametrize("case", list(TORCHS))
def test_ten_updates_match_torch(case):
    kind, given = TORCHS[case]
    name = kind.__name__.lower()
    job = small_job(optimizer=name)
    start, *gradients = numbers(1000, dtype=torch.float64)
    reference = torch.nn.Parameter(start.clone())
    optimizer = kind([reference], lr=1e-2, **given)
    weight = start.clone()
    moments = tuple(torch.zeros_like(weight) for _ in range(OptimizerStep.moment_count(job)))
    for count in range(1, 11):
        gradient = gradients[count % 3] * count
        reference.grad = gradient * 0.25
        optimizer.step()
        settings = UpdateSettings(**given)
        OptimizerStep(name, 1e-2, 0.25, count, settings).apply(weight, gradient, moments)
    torch.testing.assert_close(weight, reference.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torchs_exactly_where_nothing_is_rounded(nesterov):
    """With powers of two as settings, all that four updates of small integers make is exact."""
    given = {"weight_decay": 0.25, "momentum": 0.5, "nesterov": nesterov}
    start = torch.arange(-50.0, 50.0, dtype=torch.float64)
    reference, weight, moment = torch.nn.Parameter(start.clone()), start.clone(), start * 0
    optimizer = torch.optim.SGD([reference], lr=0.125, **given)
    for count in range(1, 5):
        gradient = start.flip(0) * count
        reference.grad = gradient * 0.5
        optimizer.step()
        OptimizerStep("sgd", 0.125, 0.5, count, UpdateSettings(**given)).apply(
            weight, gradient, (moment,)
        )
    assert torch.equal(weight, reference.detach())


@pytest.mark.parametrize(("name", "decay"), [("adam", 0.0), ("sgd", 0.0), ("adamw", 0.01)])
def test_only_adamw_decays_unasked(name, decay):
    assert UpdateSettings().decay(name) == decay
    assert UpdateSettings(weight_decay=0.5).decay(name) == 0.5
    step = OptimizerStep(name, 1e-2, 1.0, 1)
    assert step.of_group(ParameterGroup(weight_decay=0.5)).settings.decay(name) == 0.5


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_update_of_a_weight_does_not_depend_on_its_offset(name, decay):
    """torch's fused AdamW fails this: the second moment rounds differently at a tensor's end."""
    weight, gradient, m, v = numbers(5000)
    v = v.abs()
    moments = (m, v) if name != "sgd" else (m,)
    settings = UpdateSettings(weight_decay=decay, nesterov=decay > 0)
    update = OptimizerStep(name, 1e-3, gradient_factor=0.7, count=5, settings=settings)

    def updated(begin: int, end: int, *, offset: int) -> list[torch.Tensor]:
        kept = []
        for tensor in (weight, gradient, *moments):
            room = torch.empty(end - begin + offset)
            kept.append(room[offset:].copy_(tensor[begin:end]))
        update.apply(kept[0], kept[1], tuple(kept[2:]))
        return [kept[0], *kept[2:]]

    whole = updated(0, 5000, offset=0)
    draw = drawn("pieces")
    for _ in range(200):
        begin = draw.randrange(5000)
        end = min(begin + draw.choice([1, 2, 7, 15, 33, 1000]), 5000)
        pieces = updated(begin, end, offset=draw.randrange(17))
        for piece, all_of_it in zip(pieces, whole, strict=True):
            assert torch.equal(piece, all_of_it[begin:end]), (begin, end)


def test_buffers_larger_than_one_chunk_are_updated():
    start, gradient, m, v = numbers(2**17 + 5)
    update = OptimizerStep("adam", 1e-3, gradient_factor=1.0, count=1)
    weight = start.clone()
    update.apply(weight, gradient, (m.zero_(), v.zero_()))
    torch.testing.assert_close(weight, start - 1e-3 * gradient.sign(), rtol=0, atol=1e-5)


def test_learning_rate_is_a_function_of_the_step():
    job = small_job(learning_rate=1.0, warmup_steps=4, steps=12)
    warm_up = [learning_rate(job, step) for step in range(4)]
    assert warm_up == [0.25, 0.5, 0.75, 1.0]
    assert [learning_rate(job, step) for step in (4, 8, 11, 99)] == [1.0] * 4
    linear = replace(job, schedule="linear")
    assert [learning_rate(linear, step) for step in (4, 8, 12, 99)] == [1.0, 0.5, 0.0, 0.0]
    cosine = replace(job, schedule="cosine")
    rates = [learning_rate(cosine, step) for step in (4, 6, 8, 12, 99)]
    assert rates == pytest.approx([1.0, (1 + 0.5**0.5) / 2, 0.5, 0.0, 0.0])


def test_gradients_are_clipped_to_the_jobs_norm():
    assert clip_factor(10.0, None) == clip_factor(10.0, 10.0) == clip_factor(1.0, 2.0) == 1.0
    assert clip_factor(10.0, 2.5) == 0.25


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_fused_kernel_makes_the_same_update_to_rounding(optimizer, decay):
    settings = UpdateSettings(weight_decay=decay)
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(1000, generator=generator) for _ in range(2)]
    found = []
    for fuses in (False, True):
        weight, gradient = (each.clone() for each in start)
        moments = torch.zeros(1000), torch.zeros(1000)
        for count in range(1, 4):
            step = OptimizerStep(optimizer, 1e-2, 0.125, count, settings, is_fused=fuses)
            step.apply(weight, gradient.clone(), moments)
        found.append((weight, *moments))
    for exact, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, exact, rtol=2e-5, atol=1e-7)


def test_fused_kernel_is_for_gpus_of_one_kind():
    job, one = small_job(optimizer="adamw"), plan_of(8, (1, [(0, 5, 1)]))
    stages = (Stage((0, 2), 1, (Place("A100-40", "m", "z"),)), Stage((2, 5), 1, (HERE,)))
    two = Plan(8, (Pipeline(1, stages),))
    gpu = torch.device("cuda", 0)
    assert is_fused(job, one, gpu)
    assert not is_fused(job, two, gpu)
    assert not is_fused(job, one, torch.device("cpu"))
    exact = replace(job, model=replace(job.model, family="exact"))
    assert not is_fused(exact, one, gpu)
