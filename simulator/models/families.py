"""Builds models of the families GPT-2, GPT-Neo, OPT, LLaMA and ViT from a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from simulator.documents.problems import InputError, Problem, Problems, nearest
from simulator.models.architecture import Architecture, Nonlinearity, Rotary
from simulator.models.embedding_and_head import (
    class_head,
    language_head,
    patch_embedding,
    token_embedding,
)
from simulator.models.layers import Model
from simulator.models.transformer_block import TORCH, Activation, Kernels, TransformerConfig, block

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
# Far above any real size, and low enough that all counts stay exact in a float.
_NUMBER_MAX = 10_000_000
_LAYERS_MAX = 10_000
"""Absurd numbers of layers cost minutes and gigabytes."""


@dataclass(frozen=True, slots=True)
class _Family:
    """The fixed properties of a family, and its defaults."""

    vocab: int
    sequence: int
    activation: Activation = "gelu"
    tied: bool = True
    rms_norm: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    # Rows of the position table beyond the sequence length; None: rotary positions, no table.
    extra_positions: int | None = 0
    vision: bool = False
    # Which GELU the family uses, and how it computes scores and norms.
    gelu: Nonlinearity = "gelu"
    norm_epsilon: float = 1e-5
    scaled_scores: bool = True
    # Attention window in tokens of every second block; 0: none.
    window: int = 0


_FAMILIES: dict[str, _Family] = {
    "gpt2": _Family(vocab=50257, sequence=1024, gelu="gelu_tanh"),
    # Every second block has a window of 256 tokens, implemented by a mask: all scores are still
    # computed and kept, so it costs as much as the others.
    "gpt-neo": _Family(
        vocab=50257,
        sequence=2048,
        qkv_bias=False,
        gelu="gelu_tanh",
        scaled_scores=False,
        window=256,
    ),
    # Positions start at 2, so the table has two more rows.
    "opt": _Family(vocab=50272, sequence=2048, activation="relu", extra_positions=2),
    "llama": _Family(
        vocab=32000,
        sequence=4096,
        activation="swiglu",
        tied=False,
        rms_norm=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        extra_positions=None,
    ),
    # Computes with fixed-point numbers, for tests of the runtime
    # (worker/models/built_in/exact.py); its costs are those of an OPT of its size.
    "exact": _Family(vocab=256, sequence=64, activation="relu"),
    "vit": _Family(vocab=1000, sequence=0, tied=False, vision=True, norm_epsilon=1e-12),
}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")
_TEXT_SIZES = ("vocab", "sequence", "embedding_width")
_IMAGE_SIZES = ("image", "patch", "channels", "classes")
_BIASES = ("qkv_bias", "output_bias", "mlp_bias")
_SWITCHES = ("dropout", "attention_dropout", "norm_first", "tied", "bias", *_BIASES)


def family_named(name: str, *, place: str = "family") -> str:
    """Return the canonical name of a family; ``gpt_neo`` is ``gpt-neo``."""
    known = str(name).lower().replace("_", "-")
    if known not in _FAMILIES:
        cure = nearest(known, FAMILIES)
        raise InputError(Problem(place, f'there is no model family "{name}"', cure))
    return known


def build_model(
    family: str,
    *,
    name: str | None = None,
    place: str = "model",
    kernels: Kernels = TORCH,
    pad_vocab_to: int = 1,
    **numbers: object,
) -> Model:
    """Build a model of a family from its numbers; raise ``InputError`` with all their mistakes.

    ``layers``, ``hidden`` and ``heads`` are required. ``kv_heads``, ``head_dim``, ``ffn``,
    ``vocab``, ``sequence``, ``activation``, ``tied``, ``dropout``, ``attention_dropout``,
    ``norm_first``, ``embedding_width`` and ``bias`` (``qkv_bias``, ``output_bias``, ``mlp_bias``)
    default to the family's. A ViT takes ``image``, ``patch``, ``channels`` and ``classes``
    instead of ``vocab`` and ``sequence``.
    """
    family = family_named(family, place=f"{place}.family")
    facts = _FAMILIES[family]
    problems = Problems()
    _check(numbers, facts, problems, place=place)
    _check_size("pad_vocab_to", pad_vocab_to, problems, place=place)
    problems.raise_if_any()
    sizes = {key: value for key, value in numbers.items() if isinstance(value, int)}
    _check_fit(sizes, facts, problems, place=place)
    problems.raise_if_any()
    text = {key: value for key, value in numbers.items() if isinstance(value, str)}
    complete = _complete(sizes, text, facts, kernels=kernels, pad_vocab_to=pad_vocab_to)
    architecture = _architecture(complete, sizes, facts)
    return _assemble(complete, architecture, family=family, name=name or family)


def _check(
    numbers: Mapping[str, object], facts: _Family, problems: Problems, *, place: str
) -> None:
    sizes = (*_SIZES, *(_IMAGE_SIZES if facts.vision else _TEXT_SIZES))
    known = (*sizes, *_SWITCHES, "activation")
    for key in ("layers", "hidden", "heads"):
        if numbers.get(key) is None:
            problems.add(f"{place}.{key}", "is missing", "give a positive integer")
    for key, value in numbers.items():
        if key not in known:
            problems.add(f"{place}.{key}", "is not a number of this family", nearest(key, known))
        elif value is None:
            continue
        elif key in sizes:
            _check_size(key, value, problems, place=place)
        elif key in _SWITCHES and not isinstance(value, bool):
            problems.add(f"{place}.{key}", f"is {value!r}", "give true or false")
        elif key == "activation" and value not in ACTIVATIONS:
            cure = nearest(str(value), ACTIVATIONS)
            problems.add(f"{place}.{key}", f"is {value!r}, which is not known", cure)


def _check_size(key: str, value: object, problems: Problems, *, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        problems.add(f"{place}.{key}", f"is {value!r}", "give a positive integer")
        return
    most = _LAYERS_MAX if key == "layers" else _NUMBER_MAX
    if not 1 <= value <= most:
        problems.add(f"{place}.{key}", f"is {value}", f"give an integer from 1 to {most:,}")


def _check_fit(sizes: Mapping[str, int], facts: _Family, problems: Problems, *, place: str) -> None:
    hidden, heads = sizes["hidden"], sizes["heads"]
    if "head_dim" not in sizes and hidden % heads:
        what = f"{heads} heads do not divide the hidden width {hidden}"
        problems.add(f"{place}.heads", what, "change one, or give head_dim")
    kv_heads = sizes.get("kv_heads", heads)
    if heads % kv_heads:
        what = f"{kv_heads} key/value heads do not divide {heads} heads"
        problems.add(f"{place}.kv_heads", what, "give a divisor of heads")
    if facts.extra_positions is None and sizes.get("head_dim", hidden // heads) % 2:
        what = f"the head width {sizes.get('head_dim', hidden // heads)} is odd"
        problems.add(f"{place}.heads", what, "rotary positions need an even head width")
    if facts.vision:
        image, patch = sizes.get("image", 224), sizes.get("patch", 16)
        if image % patch:
            what = f"patches of {patch} pixels do not divide an image of {image}"
            problems.add(f"{place}.patch", what, "give a divisor of image")


def _complete(
    sizes: Mapping[str, int],
    text: Mapping[str, str],
    facts: _Family,
    *,
    kernels: Kernels,
    pad_vocab_to: int,
) -> TransformerConfig:
    """Fill in the family's defaults. ``sizes`` holds the switches too: a bool is an int."""
    hidden, heads = sizes["hidden"], sizes["heads"]
    chosen = text.get("activation", facts.activation)
    activation = next(known for known in ACTIVATIONS if known == chosen)
    sequence = sizes.get("sequence", facts.sequence)
    positions = 0 if facts.extra_positions is None else sequence + facts.extra_positions
    vocab = -(-sizes.get("vocab", facts.vocab) // pad_vocab_to) * pad_vocab_to
    image_values = patch_values = 0
    if facts.vision:
        image, patch = sizes.get("image", 224), sizes.get("patch", 16)
        channels = sizes.get("channels", 3)
        positions = sequence = (image // patch) ** 2 + 1
        image_values, patch_values = channels * image**2, channels * patch**2
        vocab = sizes.get("classes", facts.vocab)
    dropout = bool(sizes.get("dropout", False))
    bias = {key: bool(sizes.get(key, sizes.get("bias", getattr(facts, key)))) for key in _BIASES}
    return TransformerConfig(
        layers=sizes["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=sizes.get("kv_heads", heads),
        head_dim=sizes.get("head_dim", hidden // heads),
        ffn=sizes.get("ffn", _usual_ffn(hidden, gated=activation == "swiglu")),
        vocab=vocab,
        sequence=sequence,
        activation=activation,
        rms_norm=facts.rms_norm,
        norm_first=bool(sizes.get("norm_first", True)),
        qkv_bias=bias["qkv_bias"],
        output_bias=bias["output_bias"],
        mlp_bias=bias["mlp_bias"],
        position_rows=positions,
        embedding_width=sizes.get("embedding_width", hidden),
        tied=bool(sizes.get("tied", facts.tied)),
        dropout=dropout,
        attention_dropout=bool(sizes.get("attention_dropout", dropout)),
        kernels=kernels,
        image_values=image_values,
        patch_values=patch_values,
    )


def _usual_ffn(hidden: int, *, gated: bool) -> int:
    """Return 4 x hidden; for gated MLPs 8/3 x hidden, rounded up to a multiple of 256."""
    if not gated:
        return 4 * hidden
    return -(-(8 * hidden // 3) // 256) * 256


def _architecture(n: TransformerConfig, sizes: Mapping[str, int], facts: _Family) -> Architecture:
    """Describe how the layers compute, from the config and the family."""
    windows = tuple(facts.window * (i % 2) for i in range(n.layers)) if facts.window else ()
    return Architecture(
        head_dim=n.head_dim,
        nonlinearity=facts.gelu if n.activation == "gelu" else n.activation,
        embedding_width=n.embedding_width,
        rms_norm=n.rms_norm,
        norm_first=n.norm_first,
        norm_epsilon=facts.norm_epsilon,
        scaled_scores=facts.scaled_scores,
        windows=windows,
        position_offset=facts.extra_positions or 0,
        rotary=Rotary() if facts.extra_positions is None else None,
        image=sizes.get("image", 224) if facts.vision else 0,
        patch=sizes.get("patch", 16) if facts.vision else 0,
        channels=sizes.get("channels", 3) if facts.vision else 0,
    )


def _assemble(
    numbers: TransformerConfig, architecture: Architecture, *, family: str, name: str
) -> Model:
    vision = architecture.image > 0
    first = patch_embedding(numbers) if vision else token_embedding(numbers)
    last = class_head(numbers) if vision else language_head(numbers)
    # All blocks share one block's tensors and costs, so these are computed once for all.
    like = block(numbers, "block")
    blocks = (replace(like, name=f"block {i}") for i in range(1, numbers.layers + 1))
    return Model(
        name=name,
        family=family,
        layers=(first, *blocks, last),
        hidden=numbers.hidden,
        heads=numbers.heads,
        kv_heads=numbers.kv_heads,
        ffn=numbers.ffn,
        vocab=numbers.vocab,
        sequence_max=numbers.sequence,
        learned_positions=numbers.position_rows > 0,
        tied=numbers.tied,
        architecture=architecture,
    )
