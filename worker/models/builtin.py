"""The layers of the built-in model families, built from the simulator's description."""

from __future__ import annotations

from torch import nn

from simulator.models.architecture import Architecture
from simulator.models.layers import Model
from simulator.spec.job import Job
from worker.models.attention import AttentionShape
from worker.models.block import Block
from worker.models.embedding_and_head import LanguageHead, TokenEmbedding
from worker.models.exact import exact_layer
from worker.models.vision import ClassHead, PatchEmbedding


def builtin_layer(job: Job, index: int) -> nn.Module:
    """Build one full layer of the job's model."""
    model, architecture = job.model, job.model.architecture
    assert architecture is not None, f"{model.name} is of an unknown family"
    if model.family == "exact":
        return exact_layer(job, index)
    vision = architecture.image > 0
    match model.layers[index].kind:
        case "embedding":
            if vision:
                return PatchEmbedding(
                    image=architecture.image,
                    patch=architecture.patch,
                    channels=architecture.channels,
                    hidden=model.hidden,
                    dropout=job.dropout,
                )
            return _token_embedding(model, architecture, dropout=job.dropout)
        case "block":
            return _block(job, architecture, index)
        case "head":
            if vision:
                return ClassHead(
                    hidden=model.hidden,
                    classes=model.vocab,
                    rms_norm=architecture.rms_norm,
                    norm_epsilon=architecture.norm_epsilon,
                )
            return LanguageHead(
                vocabulary=model.vocab,
                width=architecture.embedding_width,
                hidden=model.hidden,
                normed=architecture.norm_first,
                rms_norm=architecture.rms_norm,
                norm_epsilon=architecture.norm_epsilon,
            )


def _token_embedding(model: Model, architecture: Architecture, *, dropout: float) -> nn.Module:
    return TokenEmbedding(
        vocabulary=model.vocab,
        width=architecture.embedding_width,
        hidden=model.hidden,
        position_rows=_rows(model, 0, "position.weight"),
        position_offset=architecture.position_offset,
        dropout=dropout,
    )


def _block(job: Job, architecture: Architecture, index: int) -> nn.Module:
    model, windows = job.model, architecture.windows
    shape = AttentionShape(
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=architecture.head_dim,
        norm_epsilon=architecture.norm_epsilon,
        rms_norm=architecture.rms_norm,
        qkv_bias=_rows(model, index, "attention.query.bias") > 0,
        output_bias=_rows(model, index, "attention.output.bias") > 0,
        causal=architecture.image == 0,
        window=windows[index - 1] if windows else 0,
        scaled=architecture.scaled_scores,
        rotary=architecture.rotary,
        fused=job.flash_attention,
    )
    return Block(
        shape,
        ffn=model.ffn,
        nonlinearity=architecture.nonlinearity,
        mlp_bias=_rows(model, index, "mlp.up.bias") > 0,
        norm_first=architecture.norm_first,
        dropout=job.dropout,
    )


def _rows(model: Model, index: int, name: str) -> int:
    """Return the first dimension of a tensor of the layer, 0 if there is no such tensor."""
    return next((t.shape[0] for t in model.layers[index].tensors if t.name == name), 0)
