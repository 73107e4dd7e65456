"""Attention where the fused kernel takes heads in groups, and where it does not."""

from __future__ import annotations

import pytest
import torch

from tests.worker.tiny_models import job_of, layers_of, one_pass
from worker.models.built_in import attention


def fits_flash(params):
    """Torch's rules for flash attention on an A100."""
    return params.query.dtype.itemsize == 2 and params.attn_mask is None


def with_flash(monkeypatch):
    """Say that flash attention takes what it can; return the list of which heads are grouped."""
    asked = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def ask(*args, **options):
        asked.append(options["enable_gqa"])
        return attend(*args, **options)

    monkeypatch.setattr(attention.functional, "scaled_dot_product_attention", ask)
    monkeypatch.setattr(attention, "has_flash", fits_flash)
    return asked


@pytest.mark.parametrize(
    ("dtype", "window", "is_grouped"),
    [(torch.bfloat16, 0, True), (torch.float32, 0, False), (torch.bfloat16, 5, False)],
    ids=["bf16", "fp32", "window"],
)
def test_heads_stay_grouped_only_where_flash_attention_takes_them(
    monkeypatch, dtype, window, is_grouped
):
    """Elsewhere torch would keep all scores."""
    asked = with_flash(monkeypatch)
    job = job_of("llama-grouped")
    part = attention.Attention(job, job.model.architecture, 1).to(dtype)
    part.window = window
    part(torch.ones(2, job.sequence, job.model.hidden, dtype=dtype))
    assert asked == [is_grouped]


def test_expanded_heads_give_the_same_loss_and_gradients(monkeypatch):
    job = job_of("llama-grouped")
    grouped = one_pass(job, layers_of(job, tp=1, index=0, group=None))
    asked = with_flash(monkeypatch)
    expanded = one_pass(job, layers_of(job, tp=1, index=0, group=None))
    assert asked
    assert not any(asked)
    torch.testing.assert_close(expanded.loss, grouped.loss)
    for key, values in grouped.gradients.items():
        torch.testing.assert_close(expanded.gradients[key], values)
