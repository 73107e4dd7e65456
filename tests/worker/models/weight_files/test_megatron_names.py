"""Our tensors stand in Megatron's where Megatron expects them, each element once."""

from __future__ import annotations

from collections import Counter

import pytest

from sailord.planning.job_spec import read_job
from simulator.documents.problems import InputError
from worker.models.weight_files.foreign_tensors import StoredTensor
from worker.models.weight_files.megatron_names import megatron_tensors, transformer_of

SPEC = """
[model]
family = "llama"
layers = 2
hidden = 8
heads = 4
kv_heads = 2
ffn = 6
vocab = 11
sequence = 8

[training]
global_batch = 8
sequence = 8
precision = "fp32"
max_tp = 2
"""
GPT = SPEC.replace("llama", "gpt2").replace("kv_heads = 2\n", "")


def tensors_of(spec, stored=None):
    return megatron_tensors(transformer_of(read_job(spec), None), stored)


def test_a_group_has_its_queries_then_its_key_and_its_value():
    (fused,) = (t for t in tensors_of(SPEC) if t.name.endswith("qkv.weight") and t.window.offset[0])
    assert fused.shape == (16, 8)
    assert fused.window.stored_shape == (2, 16, 8)
    assert [(s.tensor, s.span, s.begin) for s in fused.strips] == [
        ((2, "attention.query.weight"), range(4), 0),
        ((2, "attention.key.weight"), range(2), 4),
        ((2, "attention.value.weight"), range(2), 6),
        ((2, "attention.query.weight"), range(4, 8), 8),
        ((2, "attention.key.weight"), range(2, 4), 12),
        ((2, "attention.value.weight"), range(2, 4), 14),
    ]


def test_a_gated_projection_has_the_gate_first_and_then_the_other_half():
    found = [t for t in tensors_of(SPEC) if t.name == "decoder.layers.mlp.linear_fc1.weight"]
    assert [(t.strips[0].tensor[1], t.window.offset, t.shape) for t in found] == [
        ("mlp.gate.weight", (0, 0, 0), (6, 8)),
        ("mlp.up.weight", (0, 6, 0), (6, 8)),
        ("mlp.gate.weight", (1, 0, 0), (6, 8)),
        ("mlp.up.weight", (1, 6, 0), (6, 8)),
    ]
    assert {t.window.stored_shape for t in found} == {(2, 12, 8)}


@pytest.mark.parametrize("spec", [SPEC, GPT], ids=["llama", "gpt2"])
def test_every_row_of_ours_is_in_megatrons_tensors_once(spec):
    model = read_job(spec).model
    rows = Counter(
        (strip.tensor, row) for t in tensors_of(spec) for strip in t.strips for row in strip.span
    )
    wanted = {
        ((index, tensor.name), row)
        for index, layer in enumerate(model.layers)
        for tensor in layer.tensors
        if tensor.tied_to is None
        for row in range(tensor.shape[0])
    }
    assert rows == Counter(wanted)


def test_a_tied_head_is_stored_once():
    names = [t.name for t in tensors_of(GPT)]
    assert "embedding.word_embeddings.weight" in names
    assert "output_layer.weight" not in names


def test_names_follow_the_checkpoint():
    """Layers may be stored apart, halves of a gated projection, too, and vocabularies padded."""

    def stored(*shape):
        return StoredTensor(shape, "float32", is_float=True)

    apart = {
        "embedding.word_embeddings.weight": stored(128, 8),
        "decoder.layers.0.mlp.linear_fc1.weight_w": stored(6, 8),
        "decoder.layers.0.mlp.linear_fc1.weight_v": stored(6, 8),
    }
    found = {t.name: t for t in tensors_of(SPEC, apart)}
    assert found["embedding.word_embeddings.weight"].shape == (128, 8)
    assert found["embedding.word_embeddings.weight"].strips[0].span == range(11)
    gate = found["decoder.layers.0.mlp.linear_fc1.weight_w"]
    assert (gate.shape, gate.window) == ((6, 8), None)
    assert found["decoder.layers.1.mlp.linear_fc1.weight"].window.stored_shape == (12, 8)
    assert found["decoder.layers.1.self_attention.linear_qkv.weight"].shape == (16, 8)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"llama"', '"opt"', "the model: is opt, whose tensors have no names in Megatron"),
        ('"llama"', '"gpt-neo"', "the model: is gpt-neo, whose"),
        ("vocab = 11", "vocab = 11\nnorm_first = false", "has norms behind its blocks"),
    ],
)
def test_other_models_are_refused_by_name(old, new, told):
    assert old in SPEC
    spec = SPEC.replace(old, new)
    if "llama" not in new and old == '"llama"':
        spec = spec.replace("kv_heads = 2\n", "")
    with pytest.raises(InputError, match=told):
        tensors_of(spec)
