"""How a model computes, from a Hugging Face ``config.json``: what its costs do not show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from simulator.documents.problems import Problems
from simulator.models.architecture import Architecture, Nonlinearity, Rotary

_GELU: dict[str, Nonlinearity] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# The key of the norms' epsilon and what the format means where it is left out.
_EPSILON = {
    "gpt2": ("layer_norm_epsilon", 1e-5),
    "gpt_neo": ("layer_norm_epsilon", 1e-5),
    "opt": ("layer_norm_eps", 1e-5),
    "llama": ("rms_norm_eps", 1e-6),
    "vit": ("layer_norm_eps", 1e-12),
}
_ROTARY_KINDS = ("default", "linear", "llama3")


def refined(
    architecture: Architecture,
    config: Mapping[str, object],
    *,
    activation: str,
    layers: int,
    problems: Problems,
) -> Architecture:
    """Return the family's architecture with what the config says of its computation."""
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
    """Read GPT-Neo's ``attention_types``: kinds of attention, repeated so many times."""
    width = int(_positive(config, "window_size", 256, problems))
    written = config.get("attention_types")
    if written is None:
        return tuple(width * (block % 2) for block in range(layers))
    kinds: list[object] = []
    for entry in written if isinstance(written, Sequence) else ():
        match entry:
            case [list(names), int(times)] if times > 0:
                kinds += names * min(times, layers)
    if len(kinds) != layers or set(kinds) - {"global", "local"}:
        what = f"does not name the attention of {layers} layers"
        cure = f'such as [[["global", "local"], {max(layers // 2, 1)}]]'
        problems.add("attention_types", what, cure)
    return tuple(width if kind == "local" else 0 for kind in kinds)


def _rotary(config: Mapping[str, object], problems: Problems) -> Rotary:
    """Read the rotary base and its scaling, which newer files keep in one table."""
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
        cure = f"covered are {', '.join(_ROTARY_KINDS)}"
        problems.add(f"{at}rope_type", f"is {kind!r}, which is not covered", cure)
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
