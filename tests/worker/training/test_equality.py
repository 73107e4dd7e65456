"""Training under any plan matches a plain loop over the whole batch on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from simulator.models.families import build_model
from tests.worker.random_plan import any_interleaved_plan, any_plan
from tests.worker.training_runs import (
    PlainLoop,
    alone,
    drawn,
    mean_gradients,
    plan_of,
    small_job,
    trained,
)
from worker.layout.rank_layout import plan_problems
from worker.training.precision import FP64

JOBS = {
    "tied": small_job("gpt2", dropout=0.1, tied=True),
    "untied": small_job("gpt2", tied=False, optimizer="adam", gradient_sync="serial"),
    "grouped heads": small_job("llama", tied=False),
    "post norm": small_job("opt", dropout=0.2),
}


def deep(family, **numbers):
    """Return a model with enough layers for device groups of several chunks."""
    return build_model(family, layers=7, hidden=16, heads=4, vocab=30, **numbers)


DEEP_JOBS = {
    "tied": small_job(model=deep("gpt2", tied=True), dropout=0.1),
    "untied": small_job(model=deep("gpt2", tied=False), gradient_sync="serial"),
    "grouped heads": small_job(model=deep("llama", tied=False, kv_heads=2, ffn=32), zero=1),
}


FOUR = [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 5, 1)]
"""Four stages of one device each."""


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "draws"), [(JOBS, any_plan), (DEEP_JOBS, any_interleaved_plan)])
def test_gradients_under_any_plan_equal_those_of_one_process(jobs, draws, examples):
    oracles = {}
    for name, job in jobs.items():
        oracles[name] = PlainLoop(job, dtype=torch.float64)
        oracles[name].loss = oracles[name].backward(0)
    for seed in range(examples):
        draw = drawn(seed)
        name = draw.choice(list(jobs))
        job, oracle = jobs[name], oracles[name]
        plan = draws(draw, job)
        if plan is None:
            continue
        assert plan_problems(plan, job) == ()
        run = trained(job, plan, precision=FP64)
        where = f"seed {seed}, {name}: {plan}"
        assert run.disagreements == [], where
        assert run.reports[0].loss == pytest.approx(oracle.loss, rel=1e-13), where
        found, wanted = mean_gradients(run, job), oracle.gradients()
        assert found.keys() == wanted.keys(), where
        for key, gradient in wanted.items():
            close = torch.allclose(found[key], gradient, rtol=1e-11, atol=1e-14)
            assert close, f"{where}: layer and tensor {key}"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(JOBS))
def test_twenty_fp32_steps_follow_the_plain_loop(name):
    job = replace(JOBS[name], clip_norm=0.5, schedule="cosine", steps=20, warmup_steps=5)
    wanted = _plain_curve(job, steps=20)
    plans = [any_plan(drawn(f"{name} {n}"), job, ranks_max=6) for n in range(2)]
    for plan in plans:
        run = trained(job, plan, steps=20)
        assert run.disagreements == [], plan
        assert [r.loss for r in run.reports] == pytest.approx([w[0] for w in wanted], rel=1e-5)
        norms = [report.grad_norm for report in run.reports]
        assert norms == pytest.approx([w[1] for w in wanted], rel=1e-4), plan


def _plain_curve(job, *, steps):
    """Return loss and gradient norm of each step with torch's optimizer, clipping and schedule."""
    oracle = PlainLoop(job, dtype=torch.float32)
    if job.optimizer == "adamw":
        optimizer = torch.optim.AdamW(oracle.parameters, lr=job.learning_rate, weight_decay=0.01)
    else:
        optimizer = torch.optim.Adam(oracle.parameters, lr=job.learning_rate)
    warm_up = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1 / job.warmup_steps, total_iters=job.warmup_steps - 1
    )
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - job.warmup_steps)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warm_up, decay], [job.warmup_steps]
    )
    curve = []
    for step in range(steps):
        loss = oracle.backward(step)
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters, job.clip_norm)
        curve.append((loss, norm.item()))
        optimizer.step()
        schedule.step()
    return curve


def test_replicas_with_different_tp_stay_bit_equal():
    job = JOBS["tied"]
    plan = plan_of(2, (1, [(0, 2, 2), (2, 5, 1)]), (2, [(0, 1, 1), (1, 5, 4)]), (1, [(0, 5, 1)]))
    run = trained(job, plan, steps=5)
    assert run.disagreements == []


def test_replicas_under_an_interleaved_plan_stay_bit_equal():
    job = JOBS["tied"]
    plan = plan_of(1, (2, FOUR), (6, [(0, 2, 2), (2, 3, 1), (3, 4, 2), (4, 5, 1)]))
    run = trained(job, replace(plan, schedule="interleaved", virtual_stages=2), steps=5)
    assert run.disagreements == []
    wanted = trained(job, alone(job), steps=5).reports
    assert [r.loss for r in run.reports] == pytest.approx([r.loss for r in wanted], rel=1e-5)


def test_repeated_run_is_bit_equal():
    job = JOBS["post norm"]
    plan = plan_of(2, (1, [(0, 2, 2), (2, 5, 1)]), (3, [(0, 4, 1), (4, 5, 2)]))
    first, second = (trained(job, plan, steps=4, compare=False) for _ in range(2))
    assert [r.loss for r in first.reports] == [r.loss for r in second.reports]
    assert [r.grad_norm for r in first.reports] == [r.grad_norm for r in second.reports]
    for key, values in first.state.items():
        assert torch.equal(values, second.state[key]), key


def test_each_sample_is_consumed_once_under_any_plan():
    job = JOBS["untied"]
    reports = [
        trained(job, plan, steps=3, compare=False).reports
        for plan in (alone(job), plan_of(1, (5, [(0, 5, 1)]), (3, [(0, 3, 1), (3, 5, 2)])))
    ]
    for one, other in zip(*reports, strict=True):
        assert (one.samples, one.label_tokens) == (8, other.label_tokens)
        assert one.sample_hash == other.sample_hash
    assert len({report.sample_hash for report in reports[0]}) == 3
