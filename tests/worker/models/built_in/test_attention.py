"""Attention where the fused kernel does not take heads in groups."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs PyTorch")

from tests.worker.tiny_models import job_of, layers_of, one_pass
from worker.models.built_in import attention

pytestmark = pytest.mark.torch


def test_expanded_heads_give_the_same_loss_and_gradients(monkeypatch):
    job = job_of("llama-grouped")
    grouped = one_pass(job, layers_of(job, tp=1, index=0, group=None))
    asked = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def ask(*args, **options):
        asked.append(options["enable_gqa"])
        return attend(*args, **options)

    monkeypatch.setattr(attention.functional, "scaled_dot_product_attention", ask)
    monkeypatch.setattr(attention, "has_flash", lambda _: False)
    expanded = one_pass(job, layers_of(job, tp=1, index=0, group=None))
    assert asked
    assert not any(asked)
    torch.testing.assert_close(expanded.loss, grouped.loss)
    for key, values in grouped.gradients.items():
        torch.testing.assert_close(expanded.gradients[key], values)
