"""Any number of ranks computes the same states, loss and gradients as one, up to rounding."""

from __future__ import annotations

import pytest
import torch

from tests.worker.tiny_models import MODELS, batch_of, job_of, layers_of, one_pass, together
from worker.models.apply_plan import table_of

SPLITS = [(2, 2), (2, 4), (4, 4)]


def assert_equal_passes(many, one) -> None:
    close = {"rtol": 1e-11, "atol": 1e-13}
    for mine, theirs in zip(many.states, one.states, strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    torch.testing.assert_close(many.loss, one.loss, **close)
    assert many.gradients.keys() == one.gradients.keys()
    for key, gradient in one.gradients.items():
        torch.testing.assert_close(many.gradients[key], gradient, **close)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "atoms"), SPLITS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_tp_ranks_compute_what_one_rank_computes(
    name: str, tp: int, atoms: int, dropout: float
) -> None:
    job = job_of(name, max_tp=atoms, dropout=dropout)
    assert_equal_passes(together(job, tp), together(job, 1))


@pytest.mark.parametrize("name", ["gpt-neo", "llama-grouped", "vit"])
def test_unfused_attention_matches_fused_attention(name: str) -> None:
    fused, eager = (job_of(name, flash_attention=flash) for flash in (True, False))
    assert_equal_passes(together(eager, 1), together(fused, 1))


@pytest.mark.parametrize("name", ["gpt2", "llama-grouped"])
def test_recomputation_changes_nothing(name: str) -> None:
    job = job_of(name, max_tp=2, dropout=0.3)
    assert_equal_passes(together(job, 2, recompute=True), together(job, 2))


@pytest.mark.parametrize("name", MODELS)
def test_max_tp_does_not_change_the_loss(name: str) -> None:
    """It adds padding, which is never predicted and gets no gradient."""
    losses = [together(job_of(name, max_tp=atoms, dropout=0.2), 1).loss for atoms in (1, 2, 4)]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_half_precision_is_close_to_fp32(name: str, dropout: float) -> None:
    job = job_of(name, dropout=dropout)
    exact = together(job, 1).loss
    layers = layers_of(job, tp=1, index=0, group=None, dtype=torch.bfloat16)
    x, labels = batch_of(job)
    x = x.bfloat16() if x.is_floating_point() else x
    for layer in layers:
        x = layer(x)
        assert x.dtype == torch.bfloat16
    loss = layers[-1].loss_sum(x, labels)
    loss.backward()
    assert all(t.parameter.grad is not None for layer in layers for t in layer.tensors)
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)


def test_vocabulary_padding_is_zero_and_gets_no_gradient() -> None:
    job = job_of("gpt2-untied", max_tp=4)
    layers = layers_of(job, tp=1, index=0, group=None)
    one_pass(job, layers)
    for tensor in (layers[0].tensors[0], layers[-1].tensors[-1]):
        assert tensor.parameter.shape == (40, 16)
        assert not tensor.parameter[37:].any()
        assert not tensor.parameter.grad[37:].any()
        assert tensor.parameter.grad[:37].any()


def test_tied_layers_share_one_parameter() -> None:
    tied, untied = (
        layers_of(job_of(name), tp=1, index=0, group=None) for name in ("gpt2", "gpt2-untied")
    )
    assert tied[0].tensors[0].parameter is tied[-1].tensors[-1].parameter
    assert tied[-1].module.projection.weight is tied[0].module.token.weight
    assert untied[0].tensors[0].parameter is not untied[-1].tensors[-1].parameter


@pytest.mark.parametrize("name", MODELS)
def test_parameters_match_the_tensor_table(name: str) -> None:
    job = job_of(name, max_tp=4)
    for layer in layers_of(job, tp=1, index=0, group=None):
        table = table_of(job, layer.index)
        assert tuple(tensor.spec for tensor in layer.tensors) == table
        held = dict(layer.module.named_parameters())
        assert held.keys() == {spec.name for spec in table}
        assert all(held[spec.name].shape == spec.shape for spec in table)


def test_key_heads_fewer_than_atoms_are_unsplit_with_partial_gradients() -> None:
    job = job_of("llama-grouped", max_tp=4)
    specs = {spec.name: spec for spec in table_of(job, 1)}
    assert (specs["attention.key.weight"].split_dim, specs["attention.key.weight"].gradient) == (
        None,
        "partial",
    )
    assert specs["attention.query.weight"].split_dim == 0
    assert specs["attention.norm.weight"].gradient == "same"
    job = job_of("llama-grouped", max_tp=2)
    specs = {spec.name: spec for spec in table_of(job, 1)}
    assert specs["attention.key.weight"].split_dim == 0
