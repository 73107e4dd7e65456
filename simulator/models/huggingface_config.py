"""Writes a Hugging Face ``config.json`` for a model of a known family, so that exports load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.documents.problems import InputError
from simulator.models.huggingface import model_from_config
from simulator.models.layers import Model

_GELU = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "swiglu": "silu"}
_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt-neo": "GPTNeoForCausalLM",
    "opt": "OPTForCausalLM",
    "llama": "LlamaForCausalLM",
}


def config_of(model: Model, dtype: str) -> dict[str, Any] | None:
    """Return the config of a model; ``None`` if no config describes exactly this model."""
    if model.architecture is None or model.family not in _ARCHITECTURES:
        return None
    config = {
        "architectures": [_ARCHITECTURES[model.family]],
        "dtype": dtype,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab,
        **_numbers(model),
    }
    try:
        read = model_from_config(config, name=model.name)
    except InputError:
        return None
    return config if replace(read, name=model.name).fingerprint == model.fingerprint else None


def _numbers(model: Model) -> dict[str, Any]:
    """Return the model's sizes under the names that its family uses."""
    how = model.architecture
    assert how is not None
    blocks, activation = len(model.layers) - 2, _GELU[how.nonlinearity]
    if model.family == "gpt2":
        return {
            "model_type": "gpt2",
            "n_layer": blocks,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_inner": model.ffn,
            "n_positions": model.sequence_max,
            "activation_function": activation,
            "layer_norm_epsilon": how.norm_epsilon,
            "scale_attn_weights": how.scaled_scores,
        }
    same = {"hidden_size": model.hidden, "max_position_embeddings": model.sequence_max}
    if model.family == "gpt-neo":
        kinds = ["local" if width else "global" for width in how.windows] or ["global"] * blocks
        return {
            **same,
            "model_type": "gpt_neo",
            "num_layers": blocks,
            "num_heads": model.heads,
            "intermediate_size": model.ffn,
            "activation_function": activation,
            "layer_norm_epsilon": how.norm_epsilon,
            "attention_types": [[[kind], 1] for kind in kinds],
            "window_size": max(how.windows, default=0) or 256,
        }
    same |= {"num_hidden_layers": blocks, "num_attention_heads": model.heads}
    if model.family == "opt":
        return {
            **same,
            "model_type": "opt",
            "ffn_dim": model.ffn,
            "activation_function": activation,
            "word_embed_proj_dim": how.embedding_width,
            "do_layer_norm_before": how.norm_first,
        }
    return {
        **same,
        "model_type": "llama",
        "intermediate_size": model.ffn,
        "num_key_value_heads": model.kv_heads,
        "head_dim": how.head_dim,
        "hidden_act": activation,
        "rms_norm_eps": how.norm_epsilon,
        "rope_theta": 10_000.0 if how.rotary is None else how.rotary.base,
    }
