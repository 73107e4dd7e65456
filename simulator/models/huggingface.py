"""Builds models from a Hugging Face ``config.json`` by translating its keys to a family's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from simulator.documents.problems import InputError, Problem, Problems, nearest
from simulator.models.architecture import Architecture, Nonlinearity, Rotary
from simulator.models.families import build_model
from simulator.models.layers import Model
from simulator.models.transformer_block import TORCH, Kernels

_GELU: dict[str, Nonlinearity] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# All approximations of GELU cost the same; ``_refine`` distinguishes them.
_ACTIVATIONS = {**dict.fromkeys(_GELU, "gelu"), "relu": "relu"}
_GATED = {"silu": "swiglu", "swish": "swiglu"}
# The key of the norm epsilon, and its default in the format.
_EPSILON = {
    "gpt2": ("layer_norm_epsilon", 1e-5),
    "gpt_neo": ("layer_norm_epsilon", 1e-5),
    "opt": ("layer_norm_eps", 1e-5),
    "llama": ("rms_norm_eps", 1e-6),
    "vit": ("layer_norm_eps", 1e-12),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of the number of experts: Mixtral's, Qwen's, DeepSeek's."""
_ROTARY_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class _Dialect:
    """The keys under which one ``model_type`` stores the numbers of a family."""

    family: str
    # From the family's number to the config's key; optional numbers have defaults.
    required: Mapping[str, str]
    optional: Mapping[str, str]
    activation: str
    activations: Mapping[str, str] = field(default_factory=lambda: _ACTIVATIONS)
    # Keys that change the architecture, and the only value that is supported.
    covered: Mapping[str, object] = field(default_factory=dict)


_BERT_LIKE = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
}
_TEXT = {"vocab": "vocab_size", "sequence": "max_position_embeddings"}

_DIALECTS: dict[str, _Dialect] = {
    "gpt2": _Dialect(
        family="gpt2",
        required={
            "layers": "n_layer",
            "hidden": "n_embd",
            "heads": "n_head",
            "vocab": "vocab_size",
            "sequence": "n_positions",
        },
        optional={"ffn": "n_inner", "tied": "tie_word_embeddings"},
        activation="activation_function",
        covered={"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False},
    ),
    "gpt_neo": _Dialect(
        family="gpt-neo",
        required={"layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads", **_TEXT},
        optional={"ffn": "intermediate_size", "tied": "tie_word_embeddings"},
        activation="activation_function",
    ),
    "opt": _Dialect(
        family="opt",
        required={**_BERT_LIKE, **_TEXT, "ffn": "ffn_dim"},
        optional={
            "tied": "tie_word_embeddings",
            "embedding_width": "word_embed_proj_dim",
            "norm_first": "do_layer_norm_before",
            "bias": "enable_bias",
        },
        activation="activation_function",
        covered={"layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    ),
    "llama": _Dialect(
        family="llama",
        required={**_BERT_LIKE, **_TEXT, "ffn": "intermediate_size"},
        optional={
            "kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
            "tied": "tie_word_embeddings",
            "qkv_bias": "attention_bias",
            "output_bias": "attention_bias",
            "mlp_bias": "mlp_bias",
        },
        activation="hidden_act",
        activations=_GATED,
    ),
    "vit": _Dialect(
        family="vit",
        required={
            **_BERT_LIKE,
            "ffn": "intermediate_size",
            "image": "image_size",
            "patch": "patch_size",
            "channels": "num_channels",
            "classes": "num_labels",
        },
        optional={"qkv_bias": "qkv_bias"},
        activation="hidden_act",
    ),
}
MODEL_TYPES: tuple[str, ...] = tuple(_DIALECTS)


def model_from_config(
    config: object,
    *,
    name: str | None = None,
    kernels: Kernels = TORCH,
    pad_vocab_to: int = 1,
    dropout: bool = False,
) -> Model:
    """Build the model that a ``config.json`` describes; raise ``InputError`` with all mistakes.

    The config's dropout rates are ignored; the job sets dropout.
    """
    if not isinstance(config, Mapping):
        raise InputError(Problem("", "is not a table of keys", "give a Hugging Face config.json"))
    dialect = _dialect(config)
    keys = {**dialect.required, **dialect.optional}
    given = dict(config)
    if "num_labels" in keys.values() and isinstance(given.get("id2label"), Mapping):
        given.setdefault("num_labels", len(given["id2label"]))
    problems = Problems()
    numbers: dict[str, object] = {
        number: given[key] for number, key in keys.items() if given.get(key) is not None
    }
    _check_presence(given, dialect, problems)
    activation = _activation(given, dialect, problems)
    if activation is not None:
        numbers["activation"] = activation
    text_name = config.get("_name_or_path")
    chosen = name or (text_name if isinstance(text_name, str) and text_name else dialect.family)
    try:
        model = build_model(
            dialect.family,
            name=chosen,
            place="config",
            kernels=kernels,
            pad_vocab_to=pad_vocab_to,
            dropout=dropout,
            **numbers,
        )
    except InputError as error:
        _take_translated(error, keys, problems)
        raise InputError(problems.found) from None
    assert model.architecture is not None, "models of a family have an architecture"
    architecture = _refine(
        model.architecture,
        config,
        activation=dialect.activation,
        layers=len(model.layers) - 2,
        problems=problems,
    )
    problems.raise_if_any()
    return replace(model, architecture=architecture)


def _dialect(config: Mapping[str, object]) -> _Dialect:
    model_type = config.get("model_type")
    if model_type is None:
        cure = f"add one of {', '.join(MODEL_TYPES)}"
        raise InputError(Problem("model_type", "is missing", cure))
    if model_type not in MODEL_TYPES and (experts := _experts(config)):
        what = (
            f"is {model_type!r}, a mixture of {experts} experts, which a job file cannot describe"
        )
        cure = "train it by a script (docs/own-model.md), with all experts on every rank of a stage"
        raise InputError(Problem("model_type", what, cure))
    if not isinstance(model_type, str) or model_type not in _DIALECTS:
        cure = nearest(str(model_type), MODEL_TYPES)
        raise InputError(Problem("model_type", f"is {model_type!r}, which is not known", cure))
    return _DIALECTS[model_type]


def _experts(config: Mapping[str, object]) -> int:
    """Return the number of experts of a mixture; 0 for other models."""
    numbers = [config.get(key) for key in _EXPERTS]
    return next((n for n in numbers if isinstance(n, int) and n > 1), 0)


def _check_presence(config: Mapping[str, object], dialect: _Dialect, problems: Problems) -> None:
    # build_model reports the missing numbers that every family requires.
    asked_there = {dialect.required[number] for number in ("layers", "hidden", "heads")}
    for key in dialect.required.values():
        if config.get(key) is None and key not in asked_there:
            problems.add(key, "is missing", "give a positive integer")
    for key, value in dialect.covered.items():
        if key in config and config[key] != value:
            what = f"is {config[key]!r}, which changes the architecture in a way not supported"
            problems.add(key, what, f"only {value!r} is supported; or train it by a script")


def _activation(config: Mapping[str, object], dialect: _Dialect, problems: Problems) -> str | None:
    key = dialect.activation
    written = config.get(key)
    if written is None:
        return None
    if not isinstance(written, str) or written not in dialect.activations:
        cure = f"choose from {', '.join(dialect.activations)}"
        problems.add(key, f"is {written!r}, which is not supported", cure)
        return None
    return dialect.activations[written]


def _take_translated(error: InputError, keys: Mapping[str, str], problems: Problems) -> None:
    """Add problems with the family's numbers under the config's keys."""
    for problem in error.problems:
        number = problem.place.removeprefix("config.")
        key = keys.get(number, number)
        if all(known.place != key for known in problems.found):
            problems.add(key, problem.what, problem.cure)


def _refine(
    architecture: Architecture,
    config: Mapping[str, object],
    *,
    activation: str,
    layers: int,
    problems: Problems,
) -> Architecture:
    """Return the family's architecture, refined by what the config says."""
    model_type = str(config["model_type"])
    key, usual = _EPSILON[model_type]
    epsilon = _positive(config, key, usual, problems)
    written = config.get(activation)
    nonlinearity = _GELU.get(str(written), architecture.nonlinearity)
    changed = replace(architecture, norm_epsilon=epsilon, nonlinearity=nonlinearity)
    if model_type == "gpt2":
        scaled = config.get("scale_attn_weights") is not False
        changed = replace(changed, scaled_scores=scaled)
    if model_type == "gpt_neo":
        changed = replace(changed, windows=_windows(config, layers, problems))
    if model_type == "llama":
        changed = replace(changed, rotary=_rotary(config, problems))
    return changed


def _positive(
    table: Mapping[str, object], key: str, usual: float, problems: Problems, *, at: str = ""
) -> float:
    value = table.get(key)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        problems.add(f"{at}{key}", f"is {value!r}", "give a number above 0")
        return usual
    return float(value)


def _windows(config: Mapping[str, object], layers: int, problems: Problems) -> tuple[int, ...]:
    """Read GPT-Neo's ``attention_types``: lists of attention kinds with repeat counts."""
    width = int(_positive(config, "window_size", 256, problems))
    written = config.get("attention_types")
    if written is None:
        return tuple(width * (block % 2) for block in range(layers))
    kinds: list[object] = []
    for entry in written if isinstance(written, Sequence) else ():
        match entry:
            case [list(names), int(times)] if times > 0:
                kinds += names * min(times, layers)
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        what = f"does not name the attention of {layers} layers"
        cure = f'such as [[["global", "local"], {max(layers // 2, 1)}]]'
        problems.add("attention_types", what, cure)
    return tuple(width if kind == "local" else 0 for kind in kinds)


def _rotary(config: Mapping[str, object], problems: Problems) -> Rotary:
    """Read the rotary base and scaling, which newer configs keep in one table."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    table = config.get(key)
    base = _positive(config, "rope_theta", 10_000.0, problems)
    if table is None:
        return Rotary(base)
    if not isinstance(table, Mapping):
        problems.add(key, f"is {table!r:.40}", "give a table of keys, or null")
        return Rotary(base)
    at = f"{key}."
    base = _positive(table, "rope_theta", base, problems, at=at)
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in _ROTARY_KINDS:
        cure = f"choose from {', '.join(_ROTARY_KINDS)}"
        problems.add(f"{at}rope_type", f"is {kind!r}, which is not supported", cure)
    if kind not in ("linear", "llama3"):
        return Rotary(base)
    factor = _positive(table, "factor", 1.0, problems, at=at)
    if kind == "linear":
        return Rotary(base, factor)
    return Rotary(
        base,
        factor,
        low_frequency=_positive(table, "low_freq_factor", 1.0, problems, at=at),
        high_frequency=_positive(table, "high_freq_factor", 4.0, problems, at=at),
        original_tokens=int(
            _positive(table, "original_max_position_embeddings", 8192, problems, at=at)
        ),
    )
