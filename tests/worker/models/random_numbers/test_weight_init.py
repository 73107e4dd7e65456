"""Every rank starts with its shard of one model, whatever the plan."""

from __future__ import annotations

import math

import pytest
import torch

from simulator.models.presets import PRESETS, preset
from simulator.spec.job import Data, Job
from tests.worker.tiny_models import MODELS, job_of, layers_of
from worker.layout.tensor_table import table_of
from worker.models.built_in.builtin import builtin_layer
from worker.models.random_numbers import weight_init
from worker.models.random_numbers.weight_init import initial_shard


@pytest.mark.parametrize("name", PRESETS)
def test_layers_hold_the_parameters_that_the_simulator_counts(name: str) -> None:
    """Names, shapes and order: memory predictions and the runtime share one table."""
    job = Job(name=name, model=preset(name), global_batch=1, sequence=128)
    for index in {0, 1, len(job.model.layers) - 1}:
        layer = job.model.layers[index]
        with torch.device("meta"):
            made = {n: tuple(p.shape) for n, p in builtin_layer(job, index).named_parameters()}
        assert made == {tensor.name: tensor.shape for tensor in layer.tensors}
        table = table_of(job, index)
        assert [(spec.name, spec.shape, spec.split_dim) for spec in table] == [
            (tensor.name, tensor.shape, tensor.split_dim) for tensor in layer.tensors
        ]
        assert sum(math.prod(spec.shape) for spec in table) == layer.parameters()


@pytest.mark.parametrize("name", PRESETS)
def test_only_the_vocabulary_is_padded(name: str) -> None:
    job = Job(name=name, model=preset(name), global_batch=1, sequence=128, max_tp=4)
    if job.model.problems_with_tp(4):
        return
    for index in {0, 1, len(job.model.layers) - 1}:
        for spec, tensor in zip(table_of(job, index), job.model.layers[index].tensors, strict=True):
            padded = spec.shape != tensor.shape
            assert padded == (tensor.shape[0] == job.model.vocab and job.model.vocab % 4 > 0)
            assert spec.split_dim is None or spec.shape[spec.split_dim] % 4 == 0


@pytest.mark.parametrize("name", MODELS)
def test_shards_are_parts_of_one_tensor(name: str) -> None:
    job = job_of(name, max_tp=4)
    for index in range(len(job.model.layers)):
        for spec in table_of(job, index):
            whole = initial_shard(job, index, spec, range(4))
            if spec.split_dim is None:
                assert torch.equal(initial_shard(job, index, spec, range(1, 2)), whole)
                continue
            for cuts in ([(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 4)]):
                shares = [initial_shard(job, index, spec, range(*cut)) for cut in cuts]
                assert torch.equal(torch.cat(shares, spec.split_dim), whole)


def test_chunks_do_not_change_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("llama", max_tp=2)
    specs = {spec.name: spec for spec in table_of(job, 1)}
    whole = initial_shard(job, 1, specs["mlp.down.weight"], range(1))
    monkeypatch.setattr(weight_init, "_CHUNK", 17)
    assert torch.equal(initial_shard(job, 1, specs["mlp.down.weight"], range(1)), whole)


def test_initial_weights_are_small_norms_identity_and_biases_zero() -> None:
    wide = preset("gpt2")
    job = Job(name="wide", model=wide, global_batch=1, sequence=8, data=Data(seed=1))
    made = {s.name: initial_shard(job, 3, s, range(1)) for s in table_of(job, 3)}
    assert made["attention.query.weight"].std().item() == pytest.approx(0.02, rel=0.01)
    assert made["mlp.down.weight"].std().item() == pytest.approx(0.02 / 24**0.5, rel=0.01)
    assert made["mlp.norm.weight"].eq(1).all()
    assert not made["mlp.norm.bias"].any()
    assert not made["mlp.up.bias"].any()


def test_initial_weights_differ_by_tensor_layer_and_seed_unless_tied() -> None:
    job, other = job_of("gpt2"), job_of("gpt2", data=Data(seed=6))
    specs = {spec.name: spec for spec in table_of(job, 1)}

    def weights(of: Job, index: int, name: str):
        return initial_shard(of, index, specs[name], range(1))

    query = weights(job, 1, "attention.query.weight")
    for different in (
        weights(job, 2, "attention.query.weight"),
        weights(job, 1, "attention.key.weight"),
        weights(other, 1, "attention.query.weight"),
    ):
        assert not torch.equal(query, different)
    first, last = table_of(job, 0)[0], table_of(job, 3)[-1]
    assert last.tied_name == first.name
    assert torch.equal(
        initial_shard(job, 0, first, range(1)), initial_shard(job, 3, last, range(1))
    )


def test_tied_head_on_another_rank_starts_equal_to_the_embedding() -> None:
    layers = layers_of(job_of("gpt2", max_tp=2), tp=1, index=0, group=None)
    spec = layers[-1].tensors[-1].spec
    alone = initial_shard(job_of("gpt2", max_tp=2), 3, spec, range(2), dtype=torch.float64)
    assert torch.equal(alone, layers[0].tensors[0].parameter)
