"""Published models by name, with the sizes of their papers and released configurations."""

from __future__ import annotations

from dataclasses import replace

from simulator.documents.problems import InputError, Problem, nearest
from simulator.models.architecture import Rotary
from simulator.models.families import build_model
from simulator.models.layers import Model
from simulator.models.transformer_block import TORCH, Kernels

_Settings = dict[str, int | bool]


def _sizes(layers: int, hidden: int, heads: int, **others: int | bool) -> _Settings:
    return {"layers": layers, "hidden": hidden, "heads": heads, **others}


def _llama3(layers: int, hidden: int, heads: int, **others: int | bool) -> _Settings:
    more: _Settings = {"kv_heads": 8, "vocab": 128256, "sequence": 8192, **others}
    return {**_sizes(layers, hidden, heads), **more}


# GPT-2: Radford et al. 2019. GPT-Neo: EleutherAI 2021. OPT: Zhang et al. 2022, table 1; OPT-350M
# is released with its norms last and token embeddings of width 512. LLaMA 2: Touvron et al.
# 2023. Llama 3: Meta 2024, table 3 and the released configurations. ViT: Dosovitskiy et al.
# 2021, table 1.
_PRESETS: dict[str, tuple[str, _Settings]] = {
    "gpt2": ("gpt2", _sizes(12, 768, 12)),
    "gpt2-medium": ("gpt2", _sizes(24, 1024, 16)),
    "gpt2-large": ("gpt2", _sizes(36, 1280, 20)),
    "gpt2-xl": ("gpt2", _sizes(48, 1600, 25)),
    "gpt-neo-125m": ("gpt-neo", _sizes(12, 768, 12)),
    "gpt-neo-1.3b": ("gpt-neo", _sizes(24, 2048, 16)),
    "gpt-neo-2.7b": ("gpt-neo", _sizes(32, 2560, 20)),
    "opt-125m": ("opt", _sizes(12, 768, 12)),
    "opt-350m": ("opt", _sizes(24, 1024, 16, embedding_width=512, norm_first=False)),
    "opt-1.3b": ("opt", _sizes(24, 2048, 32)),
    "opt-2.7b": ("opt", _sizes(32, 2560, 32)),
    "opt-6.7b": ("opt", _sizes(32, 4096, 32)),
    "opt-13b": ("opt", _sizes(40, 5120, 40)),
    "opt-30b": ("opt", _sizes(48, 7168, 56)),
    "opt-66b": ("opt", _sizes(64, 9216, 72)),
    "llama-2-7b": ("llama", _sizes(32, 4096, 32, ffn=11008)),
    "llama-2-13b": ("llama", _sizes(40, 5120, 40, ffn=13824)),
    "llama-2-70b": ("llama", _sizes(80, 8192, 64, kv_heads=8, ffn=28672)),
    "llama-3-8b": ("llama", _llama3(32, 4096, 32, ffn=14336)),
    "llama-3-70b": ("llama", _llama3(80, 8192, 64, ffn=28672)),
    "llama-3.2-1b": ("llama", _llama3(16, 2048, 32, ffn=8192, tied=True, sequence=131072)),
    "llama-3.2-3b": ("llama", _llama3(28, 3072, 24, ffn=8192, tied=True, sequence=131072)),
    "vit-b": ("vit", _sizes(12, 768, 12)),
    "vit-l": ("vit", _sizes(24, 1024, 16)),
    "vit-h": ("vit", _sizes(32, 1280, 16, patch=14)),
}
# Llama 3 has a larger rotary base than the family; Llama 3.2 extends contexts of 8,192 tokens.
_LONG = Rotary(500_000.0, 32.0, low_frequency=1.0, high_frequency=4.0, original_tokens=8192)
_ROTARY: dict[str, Rotary] = {
    "llama-3-8b": Rotary(500_000.0),
    "llama-3-70b": Rotary(500_000.0),
    "llama-3.2-1b": _LONG,
    "llama-3.2-3b": _LONG,
}
PRESETS: tuple[str, ...] = tuple(_PRESETS)


def preset(
    name: str,
    *,
    place: str = "model.preset",
    kernels: Kernels = TORCH,
    pad_vocab_to: int = 1,
    **changes: object,
) -> Model:
    """Return the published model of this name, with ``changes`` to its sizes."""
    known = str(name).lower().replace("_", "-")
    if known not in _PRESETS:
        cure = nearest(known, PRESETS)
        raise InputError(Problem(place, f'there is no model preset "{name}"', cure))
    family, numbers = _PRESETS[known]
    model = build_model(
        family,
        name=known,
        place=place,
        kernels=kernels,
        pad_vocab_to=pad_vocab_to,
        **{**numbers, **changes},
    )
    if known not in _ROTARY or model.architecture is None:
        return model
    return replace(model, architecture=replace(model.architecture, rotary=_ROTARY[known]))
