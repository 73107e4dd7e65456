"""Ranks that share the tokens between split parts train as one process does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch

from simulator.spec.job import Job
from simulator.spec.plan import Plan
from tests.worker.random_plan import any_interleaved_plan, any_plan
from tests.worker.threads import run_as_threads
from tests.worker.training_runs import (
    PlainLoop,
    SomeLabels,
    drawn,
    mean_gradients,
    plan_of,
    small_job,
    trained,
)
from worker.layout.rank_layout import plan_problems
from worker.models.random_numbers.dropout import KeyedDropout
from worker.training.flat_buffers import LayerBuffer
from worker.training.precision import FP64
from worker.training.trainer import RankTrainer

JOBS = {
    f"{family}, dropout {dropout}": small_job(family, sequence=8, dropout=dropout)
    for family in ("gpt2", "llama", "opt")
    for dropout in (0.0, 0.1)
}
MIXED = replace(
    plan_of(2, (1, [(0, 2, 2), (2, 5, 1)]), (3, [(0, 1, 1), (1, 3, 4), (3, 4, 2), (4, 5, 2)])),
    sequence_parallel=True,
)
"""Neighbours with equal TP degrees and with others, and stages of one rank."""


def shared(draw: Random, job: Job) -> Plan:
    """Return a random plan in which ranks share tokens."""
    while True:
        plan = any_interleaved_plan(draw, job, ranks_max=6) if draw.random() < 0.4 else None
        plan = replace(plan or any_plan(draw, job, ranks_max=6), sequence_parallel=True)
        if any(stage.tp > 1 for each in plan.pipelines for stage in each.stages):
            return plan


def wrong_tensors(job: Job, plan: Plan) -> list[object]:
    """Return the tensors whose gradients differ from those of a plain loop over the batch."""
    assert plan_problems(plan, job) == ()
    oracle = PlainLoop(job, dtype=torch.float64)
    loss = oracle.backward(0)
    run = trained(job, plan, precision=FP64)
    assert run.reports[0].loss == pytest.approx(loss, rel=1e-13), plan
    found, wanted = mean_gradients(run, job), oracle.gradients()
    assert found.keys() == wanted.keys(), plan
    wrong = [
        key
        for key, gradient in wanted.items()
        if not torch.allclose(found[key], gradient, rtol=1e-11, atol=1e-14)
    ]
    return [*wrong, *run.disagreements]


@pytest.mark.parametrize("name", ["gpt2, dropout 0.1", "llama, dropout 0.0"])
def test_gradients_equal_those_of_one_process(name):
    assert wrong_tensors(JOBS[name], MIXED) == []


@pytest.mark.sim
@pytest.mark.slow
def test_gradients_under_any_plan_equal_those_of_one_process(examples):
    """With recomputation, dropout, chunks, and TP degrees that differ between stages."""
    draw, names = drawn("sequence parallel"), list(JOBS)
    for number in range(5 * examples):
        name = names[number % len(names)]
        plan = shared(draw, JOBS[name])
        assert wrong_tensors(JOBS[name], plan) == [], f"{name}: {plan}"


def test_every_rank_has_a_part_of_unsplit_gradients(monkeypatch):
    """If those of the first rank counted alone, as without sequence parallelism, most were lost."""
    zeroed = []
    monkeypatch.setattr(LayerBuffer, "zero_duplicate_gradients", zeroed.append)
    assert wrong_tensors(JOBS["llama, dropout 0.0"], MIXED) == []
    assert zeroed == []


def test_ranks_draw_the_dropout_of_their_own_tokens(monkeypatch):
    found: Counter[tuple[str, int]] = Counter()
    forward = KeyedDropout.forward

    def recorded(self, x):
        found[self.site, self.index] += 1
        return forward(self, x)

    monkeypatch.setattr(KeyedDropout, "forward", recorded)
    job = JOBS["gpt2, dropout 0.1"]
    trained(job, replace(plan_of(8, (1, [(0, 5, 2)])), sequence_parallel=True))
    sites = {site for site, _ in found}
    assert sites == {"dropout", "attention.dropout", "attention_dropout", "mlp_dropout"}
    assert {found[site, 0] - found[site, 1] for site in sites} == {0}


def test_stages_of_one_degree_send_each_other_shares_and_others_whole_activations():
    job, sent = small_job(sequence=8), {}

    def body(transport):
        send = transport.send

        def recorded(tensor, *, to):
            if tensor.is_floating_point():
                sent[transport.rank, to] = tuple(tensor.shape)
            return send(tensor, to=to)

        transport.send = recorded
        RankTrainer(job, plan, transport.rank, transport, SomeLabels(job)).step()

    plan = replace(plan_of(8, (1, [(0, 2, 2), (2, 3, 2), (3, 5, 1)])), sequence_parallel=True)
    run_as_threads(plan.device_count, body)
    share, whole = (8, 4, 16), (8, 8, 16)
    between_pairs = {(0, 2): share, (1, 3): share, (2, 0): share, (3, 1): share}
    assert sent == {**between_pairs, (2, 4): whole, (4, 2): whole, (4, 3): whole}


def test_ranks_keep_their_own_tokens_between_split_parts():
    """The input of a layer that is recomputed is all that stays of it."""
    job = small_job("llama", sequence=8)
    shapes = {}

    def body(transport):
        trainer = RankTrainer(job, plan, transport.rank, transport, SomeLabels(job))
        (runner,) = trainer._pipeline._runners.values()
        backward = runner.backward

        def recorded(number, gradient, *, layer_done):
            kept = runner._kept[number][1]
            shapes[transport.rank] = {tuple(each.input.shape) for each in kept[1:]}
            return backward(number, gradient, layer_done=layer_done)

        runner.backward = recorded
        trainer.step()

    plan = replace(plan_of(8, (1, [(0, 5, 4)])), sequence_parallel=True)
    run_as_threads(4, body)
    assert shapes == {rank: {(8, 2, 16)} for rank in range(4)}


def test_a_layer_that_is_not_finite_is_named_under_a_plan_of_several_degrees():
    """The search for it repeats the forward passes, with what they send."""
    job = replace(small_job("llama", sequence=8), skip_nonfinite=0)

    def body(transport):
        trainer = RankTrainer(job, MIXED, transport.rank, transport, SomeLabels(job))
        for index, buffer in trainer.buffers.items():
            if index == 2:
                buffer.compute.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="the output of layer 2 is not finite"):
            trainer.step()

    run_as_threads(MIXED.device_count, body)
