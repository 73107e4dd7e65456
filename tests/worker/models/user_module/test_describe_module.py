"""A traced description says what autograd really keeps."""

from __future__ import annotations

import pytest
import torch
import transformers

import sailor
from worker.models.user_module.trace_costs import pass_costs
from worker.script.recipe import Recipe

TOKENS = 48


class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(TOKENS) * (index + 1) % 61
        return {"input_ids": tokens, "labels": tokens}


def llama(*, trained):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained or "q_proj" in name)
    return model


def kept_bytes(model, dtype):
    """Return what autograd keeps of one block, computed for one sample."""
    block = model.model.layers[1].to(dtype)
    hidden = torch.randn(1, TOKENS, 32, dtype=dtype, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    given = {each.untyped_storage().data_ptr() for each in (*block.parameters(), *positions)}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage  # Holds it, so that no other takes its place.
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden, position_embeddings=positions, attention_mask=None)
    return sum(storage.nbytes() for storage in kept.values())


class OfLengths:
    def __init__(self, *lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        tokens = torch.arange(self.lengths[index]) % 61
        return {"input_ids": tokens, "labels": tokens}


def test_costs_are_those_of_the_longest_of_the_first_samples():
    def recipe(*lengths):
        return Recipe(
            llama(trained=True), OfLengths(*lengths), batch_size=4, steps=1, collate=sailor.pad
        )

    differing, alike = recipe(8, 8, 48, 20), recipe(48, 48, 48, 48)
    assert differing.job().model == alike.job().model
    assert alike.notes() == []
    (note,) = differing.notes()
    assert note == "samples have 8 to 48 tokens: costs are planned for the longest of the first 4"


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kept_activations_are_those_of_autograd(trained, precision):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    recipe = Recipe(
        llama(trained=trained), Rows(), batch_size=4, steps=1, max_tp=1, precision=precision
    )
    layer = recipe.job().model.layers[2]
    found = layer.kept_bytes(micro_batch=1, sequence=1, precision=precision)
    assert found == pytest.approx(kept_bytes(llama(trained=trained), dtype), rel=0.1)


def test_frozen_weights_keep_less_and_have_no_gradients_of_their_own():
    trained, frozen = (
        Recipe(llama(trained=each), Rows(), batch_size=4, steps=1, max_tp=1).job().model
        for each in (True, False)
    )
    setup = {"micro_batch": 1, "sequence": 1, "precision": "fp32"}
    whole, part = trained.layers[1], frozen.layers[1]
    assert part.kept_bytes(**setup) < 0.8 * whole.kept_bytes(**setup)
    assert part.backward_over_forward() < 1.2 < whole.backward_over_forward() == 2


def test_attention_whose_arguments_are_named_costs_the_same():
    attend = torch.nn.functional.scaled_dot_product_attention
    hidden = torch.zeros(1, 2, 8, 4, device="meta")
    by_place = pass_costs(lambda x: attend(x, x, x), hidden, given=())
    by_name = pass_costs(lambda x: attend(query=x, key=x, value=x), hidden, given=())
    assert by_name == by_place
    assert by_name.flops > 0
