"""Tiny models of transformers' families, and a plain training loop over them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, **_HEADS},
    "mistral": {**_SIZES, **_HEADS, "sliding_window": 4},
    "qwen2": {**_SIZES, **_HEADS, "tie_word_embeddings": True},
    "qwen3": {**_SIZES, **_HEADS, "head_dim": 8},
    "gemma": {**_SIZES, **_HEADS, "head_dim": 8},
    "gemma3_text": {**_SIZES, **_HEADS, "head_dim": 8, "sliding_window": 4},
    "phi": {**_SIZES, "num_attention_heads": 4},
    "phi3": {**_SIZES, "num_attention_heads": 4},
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 4},
    "gpt_neox": {**_SIZES, "num_attention_heads": 4},
    "opt": {
        **{"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"word_embed_proj_dim": 8, "dropout": 0.0},
    },
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**_SIZES, **_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_SIZES, **_HEADS, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_SIZES, **_HEADS, **_EXPERTS, "head_dim": 8},
    "olmoe": {**_SIZES, **_HEADS, "num_experts": 4, "num_experts_per_tok": 2},
}
"""Mixtures of experts."""
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout")
VOCABULARY, TOKENS = 40, 8


def language_model(
    family: str, *, dropout: float = 0.0, experts: str = "eager", **changes: Any
) -> nn.Module:
    """Return a model of three blocks in fp64, with random weights.

    The fused kernels of experts (``grouped_mm``) have no fp64.
    """
    sizes = {"vocab_size": VOCABULARY, **_ENDS, **{**FAMILIES, **MIXTURES}[family], **changes}
    config = AutoConfig.for_model(family, **sizes)
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, dropout)
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, experts_implementation=experts
    ).double()
    return model


def save_small_job(folder: Path) -> None:
    """Save a LLaMA of two blocks, and tokens to train it on."""
    model = language_model("llama", num_hidden_layers=2).float()
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder / "llama")
    draw = np.random.default_rng(1)
    # Token 0 is padding to transformers, whose embedding has no gradient.
    np.save(folder / "tokens.npy", draw.integers(1, VOCABULARY, 300).astype(np.uint16))


def image_model() -> nn.Module:
    """Return a vision transformer of three blocks in fp64, with random weights."""
    config = AutoConfig.for_model(
        "vit",
        **{**_SIZES, "num_attention_heads": 4, "image_size": 16, "patch_size": 8},
        **{"num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForImageClassification.from_config(config).double()
    return model


def images(count: int = 20) -> list[dict[str, Tensor]]:
    """Return noise as images, each of one of five classes."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, 16, 16, generator=draw, dtype=torch.float64)
    return [
        {"pixel_values": image, "labels": torch.tensor(number % 5)}
        for number, image in enumerate(pixels)
    ]


def sentences(count: int = 20) -> list[dict[str, Tensor]]:
    """Return samples of different lengths, padded, without labels on the padding."""
    found = []
    for index in range(count):
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, VOCABULARY, (TOKENS,), generator=draw)
        mask = (torch.arange(TOKENS) < 4 + index % 5).long()
        labels = torch.where(mask.bool(), tokens, -100)
        found.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})
    return found


@contextlib.contextmanager
def all_in_fp64() -> Iterator[None]:
    """Let code that computes norms and positions in fp32, whatever the weights, use fp64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        yield
