"""Maps our tensors to those in Megatron-Core's distributed checkpoints; without torch.

Megatron stacks the tensors of equal layers, fuses query, key and value group by group (the queries
of a group, its key, its value), and the two inner projections of a gated MLP one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from worker.models.weight_files.foreign_tensors import (
    ForeignTensor,
    StoredTensor,
    Strip,
    TensorId,
    Window,
    foreign_tensors,
)
from worker.models.weight_files.hf_names import is_transposed, roles_of

LINEARS = (
    *("self_attention.linear_qkv", "self_attention.linear_proj"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
"""The linear layers of a block."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors with a row for each token, to which Megatron may add rows."""
_BLOCK = "decoder.layers."
_OUTSIDE = {
    "embedding.token": "embedding.word_embeddings",
    "embedding.position": "embedding.position_embeddings",
    "head.norm": "decoder.final_layernorm",
    "head.projection": "output_layer",
}
_INSIDE = {
    "attention.norm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "attention.norm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "attention.query_norm.weight": "self_attention.q_layernorm.weight",
    "attention.key_norm.weight": "self_attention.k_layernorm.weight",
    "attention.output.weight": "self_attention.linear_proj.weight",
    "attention.output.bias": "self_attention.linear_proj.bias",
    "mlp.norm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.norm.bias": "mlp.linear_fc1.layer_norm_bias",
    "mlp.down.weight": "mlp.linear_fc2.weight",
    "mlp.down.bias": "mlp.linear_fc2.bias",
}
_QKV = ("attention.query", "attention.key", "attention.value")
_FAMILY_OF = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "llama"),
    "gpt2": "gpt2",
}
"""By the model type of transformers: whose names its tensors have."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """The rows of one of our tensors that stand for a tensor of a plain transformer."""

    tensor: TensorId
    shape: tuple[int, ...]
    """With rows first, whichever dimension of ours they are."""
    dim: int = 0
    first: int = 0

    def strip(self, rows: range, begin: int) -> Strip:
        """Return the strip of some of the rows."""
        return Strip(
            self.tensor, self.dim, range(self.first + rows.start, self.first + rows.stop), begin
        )


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model by the tensors of a plain transformer: those outside blocks, and of each block."""

    outside: Mapping[str, TensorRows]
    blocks: tuple[Mapping[str, TensorRows], ...]
    heads: int
    groups: int
    """Key and value heads."""


def transformer_of(job: Job, config: Mapping[str, Any] | None) -> Transformer:
    """Find the parts of a transformer in a model; ``InputError`` names what Megatron has not.

    ``config`` is that of a model of transformers, for a user's module.
    """
    frozen = [t.name for layer in job.model.layers for t in layer.tensors if t.frozen]
    if frozen:
        what = f"{frozen[0]} is frozen, and so not in checkpoints"
        raise InputError(Problem("the model", what, "use a form for adapters: huggingface"))
    if job.model.family == "module":
        return _find_module_parts(job, config)
    model, how = job.model, job.model.architecture
    if model.family not in ("llama", "gpt2") or how is None:
        raise _unknown(model.family)
    if not how.norm_first or how.embedding_width != model.hidden:
        what = "has norms behind its blocks or a narrow embedding, which Megatron has not"
        raise InputError(Problem("the model", what, "export it in another form"))
    outside: dict[str, TensorRows] = {}
    blocks: list[dict[str, TensorRows]] = [{} for _ in model.layers[1:-1]]
    for index, layer in enumerate(model.layers):
        for tensor in layer.tensors:
            if tensor.tied_to is None:
                source = TensorRows((index, tensor.name), tensor.shape)
                if layer.kind == "block":
                    blocks[index - 1][tensor.name] = source
                else:
                    outside[f"{layer.kind}.{tensor.name}"] = source
    return Transformer(outside, tuple(blocks), model.heads, model.kv_heads)


def _find_module_parts(job: Job, config: Mapping[str, Any] | None) -> Transformer:
    if config is None:
        what = "is a module, whose config is not known"
        raise InputError(Problem("the model", what, "give its script or job file with --job"))
    kind = str(config.get("model_type", "a module of your own"))
    family = _FAMILY_OF.get(kind)
    if family is None:
        raise _unknown(kind)
    outside: dict[str, TensorRows] = {}
    blocks: dict[int, dict[str, TensorRows]] = {}
    unknown = []
    for tensor in foreign_tensors(job):
        (id_,) = tensor.tensors
        number, roles = roles_of(family, tensor.name)
        if not roles:
            unknown.append(tensor.name)
        turned = is_transposed(family) and number is not None and len(tensor.shape) == 2
        shape = tensor.shape[::-1] if turned else tensor.shape
        rows = shape[0] // max(1, len(roles))
        for place, role in enumerate(roles):
            part = TensorRows(id_, (rows, *shape[1:]), dim=int(turned), first=place * rows)
            (outside if number is None else blocks.setdefault(number, {}))[role] = part
    if unknown:
        what = f"has {unknown[0]}, which Megatron has not"
        raise InputError(Problem("the model", what, "export it in another form"))
    heads = int(config.get("num_attention_heads", config.get("n_head", 0)))
    groups = int(config.get("num_key_value_heads") or heads)
    return Transformer(outside, tuple(blocks[n] for n in sorted(blocks)), heads, groups)


def _unknown(kind: str) -> InputError:
    known = ", ".join(_FAMILY_OF)
    what = f"is {kind}, whose tensors have no names in Megatron"
    return InputError(Problem("the model", what, f"known are {known}"))


def megatron_tensors(
    model: Transformer, stored: Mapping[str, StoredTensor] | None = None
) -> tuple[ForeignTensor, ...]:
    """Return Megatron's tensors, as a checkpoint has them or, without one, in its default form."""
    found = []
    for role, source in model.outside.items():
        name, _, kind = role.rpartition(".")
        if name not in _OUTSIDE:
            raise InputError(Problem("the model", f"has {role}, which Megatron has not"))
        whole = _tensor(f"{_OUTSIDE[name]}.{kind}", [source])
        there = None if stored is None else stored.get(whole.name)
        if there is not None and whole.name in VOCABULARY and there.shape[0] > whole.shape[0]:
            whole = replace(whole, shape=(there.shape[0], *whole.shape[1:]))
        found.append(whole)
    is_stacked = not any(key.startswith(f"{_BLOCK}0.") for key in stored or ())
    for number, block in enumerate(model.blocks):
        prefix = _BLOCK if is_stacked else f"{_BLOCK}{number}."
        stack = (number, len(model.blocks)) if is_stacked else None
        for tensor in _list_block_tensors(model, block):
            found += _place_in_stack(
                replace(tensor, name=prefix + tensor.name), stack, stored or {}
            )
    return tuple(found)


def _list_block_tensors(
    model: Transformer, block: Mapping[str, TensorRows]
) -> Iterator[ForeignTensor]:
    known = {*_INSIDE, *(f"{part}.{kind}" for part in _QKV for kind in ("weight", "bias"))}
    known |= {f"mlp.{part}.{kind}" for part in ("gate", "up") for kind in ("weight", "bias")}
    for role in block:
        if role not in known:
            raise InputError(Problem("the model", f"has {role}, which Megatron has not"))
    for role, name in _INSIDE.items():
        if role in block:
            yield _tensor(name, [block[role]])
    for kind in ("weight", "bias"):
        parts = [block[f"{part}.{kind}"] for part in _QKV if f"{part}.{kind}" in block]
        if parts:
            yield _fused_heads(f"self_attention.linear_qkv.{kind}", parts, model)
        inner = [block[r] for p in ("gate", "up") if (r := f"mlp.{p}.{kind}") in block]
        if inner:
            yield _tensor(f"mlp.linear_fc1.{kind}", inner)


def _tensor(name: str, sources: list[TensorRows]) -> ForeignTensor:
    """Return a tensor with sources one after the other."""
    strips, begin = [], 0
    for source in sources:
        rows = source.shape[0]
        strips.append(source.strip(range(rows), begin))
        begin += rows
    return ForeignTensor(name, (begin, *sources[0].shape[1:]), tuple(strips))


def _fused_heads(name: str, parts: list[TensorRows], model: Transformer) -> ForeignTensor:
    """Return query, key and value with the heads of each group side by side."""
    width = parts[0].shape[0] // model.heads
    counts = (model.heads // model.groups * width, width, width)
    strips, begin = [], 0
    for group in range(model.groups):
        for source, count in zip(parts, counts, strict=True):
            strips.append(source.strip(range(group * count, (group + 1) * count), begin))
            begin += count
    return ForeignTensor(name, (begin, *parts[0].shape[1:]), tuple(strips))


def _place_in_stack(
    tensor: ForeignTensor, stack: tuple[int, int] | None, stored: Mapping[str, StoredTensor]
) -> Iterator[ForeignTensor]:
    """Yield a block's tensor at its place in the stack of all blocks.

    The halves of a gated projection come one by one, since each is as large as any other tensor.
    """
    is_gated = "linear_fc1" in tensor.name and len(tensor.strips) == 2
    for strip, ending in zip(tensor.strips, ("_w", "_v"), strict=True) if is_gated else ():
        shape = (len(strip.span), *tensor.shape[1:])
        half = replace(tensor, shape=shape, strips=(replace(strip, begin=0),))
        if f"{tensor.name}{ending}" in stored:
            yield _place(replace(half, name=f"{tensor.name}{ending}"), 0, shape, stack)
        else:
            yield _place(half, strip.begin, tensor.shape, stack)
    if not is_gated:
        yield _place(tensor, 0, tensor.shape, stack)


def _place(
    tensor: ForeignTensor, row: int, shape: tuple[int, ...], stack: tuple[int, int] | None
) -> ForeignTensor:
    if stack is None and tensor.shape == shape:
        return tensor
    item, items = ((), ()) if stack is None else ((stack[0],), (stack[1],))
    offset = (*item, row, *(0 for _ in shape[1:]))
    return replace(tensor, window=Window(offset, (*items, *shape)))
