"""The exact model is bit-equal however it is split and in whatever order it is summed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from simulator.models.families import build_model
from simulator.spec.job import Data, Job
from simulator.spec.plan import Pipeline, Plan, Stage
from tests.worker.random_plan import HERE, any_interleaved_plan, any_plan
from tests.worker.threads import run_as_threads
from worker.data.sources.open_data import open_data
from worker.layout.rank_layout import plan_problems
from worker.models.apply_plan import build_layer, tie
from worker.models.built_in.exact import exact_problems
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext
from worker.models.random_numbers.weight_init import initial_shard
from worker.training.full_tensors import merge_ranks, rank_tensors
from worker.training.precision import EXACT
from worker.training.trainer import RankTrainer


def job_of(**more) -> Job:
    numbers = {"layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 37, "sequence": 12}
    shape = ("tied", "kv_heads", "activation", *numbers)
    training = {key: more.pop(key) for key in tuple(more) if key not in shape}
    model = build_model("exact", **{**numbers, **more})
    return Job("exact", model, global_batch=8, sequence=12, data=Data(seed=5), **training)


def weights(job, index, spec, atoms):
    """Return initial weights, with constant ones made uneven as by training."""
    initial = initial_shard(job, index, spec, atoms, dtype=torch.float64)
    if spec.split_dim is None and len(spec.shape) == 1:
        initial += torch.arange(len(initial)) / 37
    EXACT.derive(initial, into=initial)
    return initial


def gradients(job: Job, *, tp: int, pieces: tuple[range, ...], spread: float = 1.0):
    """Return losses and gradients of samples 0-5, summed by ``tp`` ranks piece by piece."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(job.model.vocab, (6, job.sequence + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    labels[2, :5] = -100

    def body(transport):
        group = transport.group(tuple(range(tp))) if tp > 1 else None
        context = MicroBatchContext()

        def layer(index):
            return build_layer(
                job,
                index,
                tp=tp,
                tp_index=transport.rank,
                group=group,
                context=context,
                dtype=torch.float64,
                device="cpu",
                values=lambda spec, atoms: weights(job, index, spec, atoms) * spread,
            )

        layers = [layer(index) for index in range(len(job.model.layers))]
        tie(layers)
        loss = 0.0
        for rows in pieces:
            samples = torch.tensor(list(rows))
            context.current = MicroBatch(seed=3, step=7, samples=samples)
            x = tokens[samples, :-1]
            for each in layers:
                x = each(x)
            part = layers[-1].loss_sum(x, labels[samples])
            part.backward()
            loss += float(part.detach())
        return loss, {
            (each.index, tensor.spec): tensor.parameter.grad.clone()
            for each in layers
            for tensor in each.tensors
        }

    passes = run_as_threads(tp, body)
    assert all(loss == passes[0][0] for loss, _ in passes)
    whole = {}
    for (index, spec), first in passes[0][1].items():
        shares = [found[index, spec] for _, found in passes]
        if spec.split_dim is not None:
            whole[index, spec.name] = torch.cat(shares, spec.split_dim)
        elif spec.gradient == "partial":
            whole[index, spec.name] = torch.stack(shares).sum(0)
        else:
            assert all(torch.equal(share, first) for share in shares)
            whole[index, spec.name] = first
    return passes[0][0], whole


@pytest.mark.parametrize(
    "more",
    [{}, {"tied": False, "dropout": 0.3}, {"kv_heads": 2, "dropout": 0.1}, {"kv_heads": 1}],
    ids=["tied", "untied", "grouped", "one-kv"],
)
# Far beyond what training reaches, so that values are clamped.
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_splits_and_orders_do_not_change_the_bits(more, spread) -> None:
    job = job_of(max_tp=4, **more)
    loss, one = gradients(job, tp=1, pieces=(range(6),), spread=spread)
    assert loss > 0
    assert all(gradient.any() for gradient in one.values())
    for tp, pieces in (
        (1, (range(4, 6), range(1), range(1, 4))),
        (2, (range(6),)),
        (4, (range(3, 6), range(3))),
    ):
        other_loss, other = gradients(job, tp=tp, pieces=pieces, spread=spread)
        assert other_loss == loss
        for key, gradient in one.items():
            assert torch.equal(other[key], gradient), (tp, key)


def test_untrained_model_has_the_loss_of_a_guess() -> None:
    job = job_of()
    loss, _ = gradients(job, tp=1, pieces=(range(6),))
    assert loss > (6 * 12 - 5) / 2, "half a label is the loss of who says 0 to everything"


def test_weights_stay_on_their_grid() -> None:
    masters = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    once, twice = torch.empty_like(masters), torch.empty_like(masters)
    EXACT.derive(masters, into=once)
    EXACT.derive(once, into=twice)
    assert torch.equal(once, twice)
    assert float(once.max()) == -float(once.min()) == 8.0
    assert torch.equal((once * 2**12).round(), once * 2**12)


def test_jobs_that_would_not_stay_exact_are_refused() -> None:
    assert exact_problems(job_of()) == ()
    large = replace(job_of(), global_batch=2**14)
    numbers, logits = exact_problems(large)
    assert "more than stay exact" in str(numbers)
    assert "more than sum up exactly" in str(logits)
    assert "has ReLUs" in str(exact_problems(job_of(activation="gelu"))[0])


# -- any plans, one after another -----------------------------------------------------------------


def train(job: Job, plan: Plan, steps: int, state=None):
    """Train under one plan; return the reports and the state for the next plan."""
    assert plan_problems(plan, job) == ()

    def body(transport):
        data = open_data(job, Path())
        trainer = RankTrainer(job, plan, transport.rank, transport, data)
        if state is not None:
            trainer.restore(*state)
        reports = [replace(trainer.step(), seconds=0.0, data_wait_s=0.0) for _ in range(steps)]
        return reports, rank_tensors(trainer.buffers.values()), trainer

    done = run_as_threads(plan.device_count, body)
    trainer = done[0][2]
    assert all(reports == done[0][0] for reports, _, _ in done), "ranks disagree"
    logical = merge_ranks((pieces for _, pieces, _ in done), trainer.holdings.tables)
    return done[0][0], (logical, trainer.progress)


def alone(job: Job) -> Plan:
    stage = Stage((0, len(job.model.layers)), 1, (HERE,))
    return Plan(job.global_batch, (Pipeline(1, (stage,)),))


EXACT_JOBS = {
    "tied": {"clip_norm": 0.5},
    "untied": {"tied": False, "dropout": 0.2, "optimizer": "adamw", "warmup_steps": 2},
    "grouped": {"kv_heads": 2, "optimizer": "adam", "schedule": "cosine", "steps": 12},
    "one-kv": {"kv_heads": 1, "optimizer": "sgd", "learning_rate": 0.05},
}


@pytest.mark.parametrize("name", EXACT_JOBS)
def test_sharing_tokens_does_not_change_the_bits(name) -> None:
    job = job_of(max_tp=4, **{"learning_rate": 0.01, **EXACT_JOBS[name]})
    cuts = (((0, 1), 2), ((1, 3), 4), ((3, 4), 2)), (((0, 2), 4), ((2, 4), 1))
    pipelines = (Pipeline(2, tuple(Stage(span, tp, (HERE,)) for span, tp in cut)) for cut in cuts)
    shared = Plan(2, tuple(pipelines), sequence_parallel=True)
    expected, (wanted, _) = train(job, alone(job), 2)
    reports, (state, _) = train(job, shared, 2)
    assert reports == expected
    for key, tensor in wanted.items():
        assert torch.equal(state[key], tensor), key


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_JOBS)
def test_any_sequence_of_plans_matches_one_rank(name, examples) -> None:
    """Losses, norms, sample order, gradients, weights and moments are bit-equal."""
    job = job_of(max_tp=4, **{"learning_rate": 0.01, **EXACT_JOBS[name]})
    draw = Random(name)
    plans = [any_plan(draw, job) for _ in range(max(4, examples // 8))]
    chunked = (any_interleaved_plan(draw, job) for _ in range(1000))
    first, second, last = itertools.islice(filter(None, chunked), 3)
    plans = [plans[0], first, second, *plans[1:], last]
    plans = [replace(plan, sequence_parallel=bool(n % 2)) for n, plan in enumerate(plans)]
    state = expected_state = None
    losses = []
    for plan in plans:
        steps = draw.randint(1, 3)
        expected, expected_state = train(job, alone(job), steps, expected_state)
        reports, state = train(job, plan, steps, state)
        assert reports == expected, plan
        assert state[1] == expected_state[1]
        assert state[0].keys() == expected_state[0].keys()
        for key, tensor in expected_state[0].items():
            assert torch.equal(state[0][key], tensor), (key, plan)
        losses += [report.loss for report in reports]
    assert losses[-1] < losses[0], "nothing was learned, so little was tested"
