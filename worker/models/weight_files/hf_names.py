"""Names and shapes of our tensors in Hugging Face checkpoints, by model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simulator.documents.problems import InputError, Problem
from simulator.models.layers import LayerKind, Model, TensorSpec

TensorForm = Literal["same", "transposed", "reshaped"]


@dataclass(frozen=True, slots=True)
class HfLocation:
    """The name, shape and form of one of our tensors in a Hugging Face checkpoint."""

    name: str
    form: TensorForm
    # The full tensor there; it may hold several of ours, ours from row ``offset`` on.
    shape: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _FamilyNames:
    """A family's names for our modules; the braces are the block number, from 0."""

    # Absent in checkpoints of the model without its head.
    prefix: str
    block: str
    modules: dict[LayerKind, dict[str, str]]
    # Linear layers of blocks are stored with inputs as rows.
    transposed: bool = False


_GPT = {
    "attention.norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp.norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT_FIRST = {"token": "transformer.wte", "position": "transformer.wpe"}
_GPT_LAST = {"norm": "transformer.ln_f", "projection": "lm_head"}

_FAMILIES: dict[str, _FamilyNames] = {
    "gpt2": _FamilyNames(
        prefix="transformer.",
        block="transformer.h.{}.",
        modules={
            "embedding": _GPT_FIRST,
            "block": {
                **_GPT,
                "attention.query": "attn.c_attn",
                "attention.key": "attn.c_attn",
                "attention.value": "attn.c_attn",
            },
            "head": _GPT_LAST,
        },
        transposed=True,
    ),
    "gpt-neo": _FamilyNames(
        prefix="transformer.",
        block="transformer.h.{}.",
        modules={
            "embedding": _GPT_FIRST,
            "block": {
                **_GPT,
                "attention.query": "attn.attention.q_proj",
                "attention.key": "attn.attention.k_proj",
                "attention.value": "attn.attention.v_proj",
                "attention.output": "attn.attention.out_proj",
            },
            "head": _GPT_LAST,
        },
    ),
    "opt": _FamilyNames(
        prefix="model.",
        block="model.decoder.layers.{}.",
        modules={
            "embedding": {
                "token": "model.decoder.embed_tokens",
                "position": "model.decoder.embed_positions",
                "projection": "model.decoder.project_in",
            },
            "block": {
                "attention.norm": "self_attn_layer_norm",
                "attention.query": "self_attn.q_proj",
                "attention.key": "self_attn.k_proj",
                "attention.value": "self_attn.v_proj",
                "attention.output": "self_attn.out_proj",
                "mlp.norm": "final_layer_norm",
                "mlp.up": "fc1",
                "mlp.down": "fc2",
            },
            "head": {
                "norm": "model.decoder.final_layer_norm",
                "narrowing": "model.decoder.project_out",
                "projection": "lm_head",
            },
        },
    ),
    "llama": _FamilyNames(
        prefix="model.",
        block="model.layers.{}.",
        modules={
            "embedding": {"token": "model.embed_tokens"},
            "block": {
                "attention.norm": "input_layernorm",
                "attention.query": "self_attn.q_proj",
                "attention.key": "self_attn.k_proj",
                "attention.value": "self_attn.v_proj",
                "attention.query_norm": "self_attn.q_norm",
                "attention.key_norm": "self_attn.k_norm",
                "attention.output": "self_attn.o_proj",
                "mlp.norm": "post_attention_layernorm",
                "mlp.gate": "mlp.gate_proj",
                "mlp.up": "mlp.up_proj",
                "mlp.down": "mlp.down_proj",
            },
            "head": {"norm": "model.norm", "projection": "lm_head"},
        },
    ),
    "vit": _FamilyNames(
        prefix="vit.",
        block="vit.encoder.layer.{}.",
        modules={
            "embedding": {"patch": "vit.embeddings.patch_embeddings.projection"},
            "block": {
                "attention.norm": "layernorm_before",
                "attention.query": "attention.attention.query",
                "attention.key": "attention.attention.key",
                "attention.value": "attention.attention.value",
                "attention.output": "attention.output.dense",
                "mlp.norm": "layernorm_after",
                "mlp.up": "intermediate.dense",
                "mlp.down": "output.dense",
            },
            "head": {"norm": "vit.layernorm", "projection": "classifier"},
        },
    ),
}
_FUSED = ("attention.query", "attention.key", "attention.value")
# Buffers of older files, and the pooler, which no classifier uses; not parameters of ours.
_IGNORED = (".attn.bias", ".masked_bias", ".attention.bias", ".inv_freq")
_IGNORED_PARTS = ("pooler.",)


def prefix_of(model: Model) -> str:
    """Return the prefix that checkpoints of the model without its head leave out."""
    return _names(model).prefix


def is_ignored(model: Model, name: str) -> bool:
    """Return whether a checkpoint may hold this tensor besides the parameters."""
    buffers = model.family in ("gpt2", "gpt-neo", "llama") and name.endswith(_IGNORED)
    copies = model.tied and name == "lm_head.weight"
    return buffers or copies or any(part in name for part in _IGNORED_PARTS)


def location_of(model: Model, index: int, tensor: TensorSpec) -> HfLocation:
    """Return where a checkpoint of this model's family keeps one tensor of a layer."""
    if tensor.tied_to is not None:
        own = tensor.tied_to.partition("/")[2]
        (first,) = (t for t in model.layers[0].tensors if t.name == own)
        return location_of(model, 0, first)
    special = _vision_place(model, tensor)
    if special is not None:
        return special
    names, layer = _names(model), model.layers[index]
    module, _, kind = tensor.name.rpartition(".")
    theirs = names.modules[layer.kind].get(module)
    if theirs is None:
        what = f"has {tensor.name}, which no {model.family} of Hugging Face has"
        raise InputError(Problem("model", what, "train it from initial weights"))
    if layer.kind == "block":
        theirs = names.block.format(index - 1) + theirs
    name, shape, offset = f"{theirs}.{kind}", tensor.shape, 0
    if names.transposed and module in _FUSED:
        shape, offset = _fused_place(model, index, module, kind)
    if names.transposed and layer.kind == "block" and len(shape) == 2:
        return HfLocation(name, "transposed", shape[::-1], offset)
    return HfLocation(name, "same", shape, offset)


def roles_of(family: str, name: str) -> tuple[int | None, tuple[str, ...]]:
    """Return which of our tensors a name of Hugging Face stands for; several are fused.

    The number of the block comes first, from 0; ``None`` outside blocks. Unknown names have no
    tensors.
    """
    names = _FAMILIES[family]
    before, after = names.block.split("{}")
    number, _, rest = name.removeprefix(before).partition(after)
    in_block = name.startswith(before) and number.isdecimal()
    kinds: tuple[LayerKind, ...] = ("block",) if in_block else ("embedding", "head")
    module, _, kind = (rest if in_block else name).rpartition(".")
    found = tuple(
        f"{'' if in_block else layer + '.'}{ours}.{kind}"
        for layer in kinds
        for ours, theirs in names.modules[layer].items()
        if theirs == module
    )
    return int(number) if in_block else None, found


def is_transposed(family: str) -> bool:
    """Return whether linear layers of blocks are stored with inputs as rows."""
    return _FAMILIES[family].transposed


def _fused_place(model: Model, index: int, module: str, kind: str) -> tuple[tuple[int, ...], int]:
    """Return the shape of the fused query, key and value, and the first row of one of them."""
    shapes = {tensor.name: tensor.shape for tensor in model.layers[index].tensors}
    rows = [shapes[f"{part}.{kind}"][0] for part in _FUSED]
    before = sum(rows[: _FUSED.index(module)])
    return (sum(rows), *shapes[f"{module}.{kind}"][1:]), before


def _vision_place(model: Model, tensor: TensorSpec) -> HfLocation | None:
    architecture = model.architecture
    if architecture is None or not architecture.image:
        return None
    at = "vit.embeddings."
    match tensor.name:
        case "class_token":
            return HfLocation(f"{at}cls_token", "reshaped", (1, 1, *tensor.shape))
        case "position.weight":
            return HfLocation(f"{at}position_embeddings", "reshaped", (1, *tensor.shape))
        case "patch.weight":
            edge, colours = architecture.patch, architecture.channels
            shape = (tensor.shape[0], colours, edge, edge)
            return HfLocation(f"{at}patch_embeddings.projection.weight", "reshaped", shape)
        case _:
            return None


def _names(model: Model) -> _FamilyNames:
    if model.family not in _FAMILIES:
        what = f"is {model.family!r}, which has no Hugging Face checkpoints"
        raise InputError(Problem("model.family", what, f"known are {', '.join(_FAMILIES)}"))
    return _FAMILIES[model.family]
