"""Self-attention: causal, causal within a window, or over all patches."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams
from torch.nn import functional

from simulator.models.architecture import Architecture, Rotary
from simulator.models.layers import Model
from simulator.spec.job import Job
from worker.devices.rank_device import has_flash


def norm(width: int, architecture: Architecture) -> nn.Module:
    """Return an RMS norm or a layer norm over the last dimension."""
    kind = nn.RMSNorm if architecture.rms_norm else nn.LayerNorm
    return kind(width, eps=architecture.norm_epsilon)


def tensor_rows(model: Model, index: int, name: str) -> int:
    """Return the first dimension of a tensor of the layer, 0 if there is no such tensor."""
    return next((t.shape[0] for t in model.layers[index].tensors if t.name == name), 0)


class Attention(nn.Module):
    """Self-attention with its norm and its projections, without the residual.

    The number of heads follows from the widths of the projections, so the same code computes any
    rank's share of them.
    """

    def __init__(self, job: Job, architecture: Architecture, index: int) -> None:
        super().__init__()
        model, windows = job.model, architecture.windows
        h, self.head_dim = model.hidden, architecture.head_dim
        q, kv = (heads * self.head_dim for heads in (model.heads, model.kv_heads))
        self.is_causal, self.rotary = architecture.image == 0, architecture.rotary
        self.window = windows[index - 1] if windows else 0
        """How many tokens back, including the token itself; 0: all."""
        self.scale = 1 / math.sqrt(self.head_dim) if architecture.scaled_scores else 1.0
        self.is_fused = job.uses_flash
        """Uses a fused kernel, which never stores the scores."""
        qkv_bias = tensor_rows(model, index, "attention.query.bias") > 0
        output_bias = tensor_rows(model, index, "attention.output.bias") > 0
        self.norm = norm(h, architecture)
        self.entry = nn.Identity()
        self.query = nn.Linear(h, q, bias=qkv_bias)
        self.key = nn.Linear(h, kv, bias=qkv_bias)
        self.value = nn.Linear(h, kv, bias=qkv_bias)
        self.output = nn.Linear(q, h, bias=output_bias)
        self.dropout = nn.Dropout(job.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        query, key, value = self.heads(x)
        if self.rotary is not None:
            table = _rotary_table(self.rotary, self.head_dim, x.shape[1], x.dtype, x.device)
            query, key = _rotate(query, table), _rotate(key, table)
        attended: Tensor = self._attend(query, key, value)
        out: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return out

    def heads(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values as (batch, heads, sequence, head width)."""
        return [
            projected(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.query, self.key, self.value)
        ]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sequence = query.shape[2]
        window = self.window if self.window < sequence else 0
        mask = _attention_mask(sequence, window, query.device) if window else None
        is_causal = self.is_causal and not window
        grouped = query.shape[1] != key.shape[1]
        if grouped and not (
            self.is_fused and has_flash(SDPAParams(query, key, value, mask, 0.0, is_causal, True))
        ):
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
            grouped = False
        if self.is_fused:
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=is_causal,
                scale=self.scale,
                enable_gqa=grouped,
            )
        scores = (query * self.scale) @ key.transpose(-1, -2)
        if self.is_causal:
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
