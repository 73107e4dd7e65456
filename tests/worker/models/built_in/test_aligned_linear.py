"""Products of a width that GPUs are slow with give the same numbers when they are widened."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.worker.tiny_models import MODELS, job_of, layers_of, one_pass
from worker.models.built_in import aligned_linear
from worker.models.built_in.aligned_linear import AlignedLinear


@pytest.fixture
def widths(monkeypatch):
    """Align on a CPU, too; collects the outputs of the products that were widened."""
    found = []
    pad = aligned_linear.functional.pad

    def widen(tensor, edges):
        found.append(tensor.shape[0] + edges[-1])
        return pad(tensor, edges)

    monkeypatch.setattr(aligned_linear, "needs_alignment", lambda _: True)
    monkeypatch.setattr(aligned_linear.functional, "pad", widen)
    return found


@pytest.mark.parametrize("outputs", [1, 8, 13, 50257])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_a_linear_layer(widths, outputs, bias):
    torch.manual_seed(0)
    aligned, plain = (torch.nn.Linear(4, outputs, bias=bias).double() for _ in range(2))
    aligned.__class__ = AlignedLinear
    aligned.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for layer in (aligned, plain):
        layer(x).square().sum().backward()
    torch.testing.assert_close(aligned(x), plain(x))
    for one, other in zip(aligned.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert all(width == -(-outputs // 8) * 8 for width in widths)
    assert bool(widths) == (outputs % 8 > 0)


def test_a_head_of_an_odd_vocabulary_is_widened_and_gives_the_same_loss(widths, monkeypatch):
    job = replace(job_of("gpt2"), model=MODELS["gpt2"](vocab=21))
    wide = one_pass(job, layers_of(job, tp=1, index=0, group=None))
    assert widths == [24]
    monkeypatch.setattr(aligned_linear, "needs_alignment", lambda _: False)
    plain = one_pass(job, layers_of(job, tp=1, index=0, group=None))
    torch.testing.assert_close(wide.loss, plain.loss)
