"""Self-attention: causal, causal within a window, or over all patches."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from simulator.models.architecture import Rotary


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of one attention; its widths may be those of one rank's heads."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float = 1e-5
    rms_norm: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    causal: bool = True
    # How many tokens back, including the token itself; 0: all.
    window: int = 0
    scaled: bool = True
    rotary: Rotary | None = None
    # Uses a fused kernel, which never stores the scores; not with dropout.
    fused: bool = True


def norm(width: int, *, rms: bool, epsilon: float) -> nn.Module:
    """Return an RMS norm or a layer norm over the last dimension."""
    return nn.RMSNorm(width, eps=epsilon) if rms else nn.LayerNorm(width, eps=epsilon)


class Attention(nn.Module):
    """Self-attention with its norm and its projections, without the residual.

    The number of heads follows from the widths of the projections, so the same code computes any
    rank's share of them.
    """

    def __init__(self, shape: AttentionShape, *, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.norm = norm(h, rms=shape.rms_norm, epsilon=shape.norm_epsilon)
        self.entry = nn.Identity()
        self.query = nn.Linear(h, q, bias=shape.qkv_bias)
        self.key = nn.Linear(h, kv, bias=shape.qkv_bias)
        self.value = nn.Linear(h, kv, bias=shape.qkv_bias)
        self.output = nn.Linear(q, h, bias=shape.output_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        query, key, value = (
            projected(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for projected in (self.query, self.key, self.value)
        )
        if self.shape.rotary is not None:
            table = _rotary_table(
                self.shape.rotary, self.shape.head_dim, x.shape[1], x.dtype, x.device
            )
            query, key = _rotate(query, table), _rotate(key, table)
        attended: Tensor = self._attend(query, key, value)
        out: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape, sequence = self.shape, query.shape[2]
        windowed = 0 < shape.window < sequence
        scale = 1 / math.sqrt(shape.head_dim) if shape.scaled else 1.0
        grouped = query.shape[1] != key.shape[1]
        if shape.fused and self.dropout.p == 0:
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=_attention_mask(sequence, shape.window, query.device)
                if windowed
                else None,
                is_causal=shape.causal and not windowed,
                scale=scale,
                enable_gqa=grouped,
            )
        if grouped:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        scores = (query * scale) @ key.transpose(-1, -2)
        if shape.causal:
            window = shape.window if windowed else 0
            scores = scores.masked_fill(~_attention_mask(sequence, window, query.device), -math.inf)
        kept: Tensor = self.dropout(scores.softmax(-1))
        return kept @ value


# These tables depend on their arguments alone and are shared by all layers of a rank.
@functools.lru_cache(maxsize=8)
def _attention_mask(sequence: int, window: int, device: torch.device) -> Tensor:
    """Return which tokens (columns) each token (row) may attend to."""
    everything = torch.ones(sequence, sequence, dtype=torch.bool, device=device)
    return everything.tril().triu(1 - window) if window else everything.tril()


@functools.lru_cache(maxsize=8)
def _rotary_table(
    rotary: Rotary, head_dim: int, sequence: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary embedding for each position."""
    exact = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, dtype=exact, device=device) / head_dim
    frequencies = _scale_frequencies(rotary, 1 / rotary.base**exponents)
    positions = torch.arange(sequence, dtype=exact, device=device)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scale_frequencies(rotary: Rotary, frequencies: Tensor) -> Tensor:
    if rotary.high_frequency == 0:
        return frequencies / rotary.factor
    # Rotations of each pair within the context length of the original training.
    rotations = rotary.original_tokens * frequencies / (2 * math.pi)
    span = rotary.high_frequency - rotary.low_frequency
    kept = ((rotations - rotary.low_frequency) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rotary.factor)


def _rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + half) of each head by the angles of its position."""
    first, second = x.chunk(2, -1)
    return x * table[0] + torch.cat((-second, first), -1) * table[1]
