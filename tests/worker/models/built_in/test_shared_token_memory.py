"""The simulator's bytes of a block whose ranks share tokens are those that PyTorch holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simulator.models.families import build_model
from simulator.models.layers import Model
from simulator.models.shared_tokens import with_shared_tokens
from simulator.models.transformer_block import Kernels
from simulator.spec.job import Job
from tests.simulator.models.test_models_torch import backward_peak, saved_bytes
from worker.layer_profiles.null_collective import NullCollective
from worker.models.apply_plan import LocalLayer, build_layers
from worker.models.random_numbers.microbatch_context import MicroBatch, MicroBatchContext

SEQUENCE, HIDDEN, HEADS = 128, 64, 8
SMALL: dict[str, Any] = {"layers": 1, "hidden": HIDDEN, "heads": HEADS, "vocab": 96}
MODELS = {
    "gpt2": build_model("gpt2", **SMALL),
    "opt": build_model("opt", **SMALL),
    "norm last": build_model("opt", **SMALL, norm_first=False),
    "llama": build_model("llama", **SMALL, ffn=160, kernels=Kernels(norm="composite")),
}
SHAPES = ((1, 4), (2, 8), (4, 2))
"""Samples and TP degree."""


def rank_layer(model: Model, index: int, *, batch: int, tp: int, flash: bool = True) -> LocalLayer:
    """Return what one rank of a group holds of a layer."""
    job = Job("memory", model, 8, SEQUENCE, precision="fp32", max_tp=8, flash_attention=flash)
    (layer,) = build_layers(
        job,
        [index],
        tp=tp,
        group=NullCollective(tp),
        context=MicroBatchContext(MicroBatch(0, 0, torch.arange(batch))),
        dtype=torch.float32,
        shares_tokens=True,
    )
    return layer


def tables(model: Model, *, flash: bool) -> int:
    """Return the bytes of what all layers share: cosines and sines, and the causal mask."""
    rotary = 2 * SEQUENCE * (HIDDEN // HEADS) * 4 if model.family == "llama" else 0
    return rotary + (0 if flash else SEQUENCE**2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "tp"), SHAPES)
@pytest.mark.parametrize("flash", [True, False])
def test_a_block_keeps_and_takes_what_is_counted(name, batch, tp, flash):
    model = MODELS[name]
    layer = rank_layer(model, 1, batch=batch, tp=tp, flash=flash)
    weights = {each.spec.name: each.parameter for each in layer.tensors}
    x = torch.randn(batch, SEQUENCE // tp, HIDDEN, requires_grad=True)
    layer(x)  # The tables exist from now on.
    saved = saved_bytes(lambda: layer(x), weights, tables(model, flash=flash))
    if name == "norm last":
        saved += x.nbytes  # Autograd needs the gathered input only; the runtime keeps both.
    setup = {"micro_batch": batch, "sequence": SEQUENCE, "tp": tp, "precision": "fp32"}
    counted = with_shared_tokens(model).layers[1]
    assert counted.kept_bytes(**setup, flash=flash) == saved
    peak = backward_peak(layer, weights, x)
    assert counted.workspace_bytes(**setup, flash=flash) == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("name", MODELS)
def test_a_head_keeps_its_norm_for_its_own_tokens_and_its_gathered_input(name):
    model, tp, batch = MODELS[name], 4, 2
    layer = rank_layer(model, len(model.layers) - 1, batch=batch, tp=tp)
    weights = {each.spec.name: each.parameter for each in layer.tensors}
    x = torch.randn(batch, SEQUENCE // tp, HIDDEN, requires_grad=True)
    saved = saved_bytes(lambda: layer(x), weights)
    counted = with_shared_tokens(model).layers[-1]
    # What the loss keeps of the logits and labels, which the layer alone does not compute.
    loss = [t for t in counted.kept if t.name in {"log-probabilities", "targets"}]
    setup = {"micro_batch": batch, "sequence": SEQUENCE, "tp": tp, "precision": "fp32"}
    assert counted.kept_bytes(**setup) - sum(term.bytes(**setup) for term in loss) == saved
