"""How a transformer computes: norms, nonlinearity, positions and attention windows.

The cost model does not need these; a runtime that builds the model does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# "gelu" uses the error function, "gelu_tanh" the approximation that GPT-2 was trained with.
Nonlinearity = Literal["gelu", "gelu_tanh", "relu", "swiglu"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions: pair i of a head is rotated by position x base^(-2i / head width)."""

    base: float = 10_000.0
    # Context extension (Llama 3): wavelengths above original_tokens / low_frequency are stretched
    # by the factor, those below original_tokens / high_frequency are kept, those between are
    # interpolated. Where both frequencies are 0, all are stretched.
    factor: float = 1.0
    low_frequency: float = 0.0
    high_frequency: float = 0.0
    original_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a transformer of a known family computes, without the sizes that ``Model`` has."""

    head_dim: int
    nonlinearity: Nonlinearity
    embedding_width: int
    rms_norm: bool = False
    norm_first: bool = True
    norm_epsilon: float = 1e-5
    # Scores are divided by the root of the head width.
    scaled_scores: bool = True
    # Attention window of each block in tokens, 0 for none; empty: no block has a window.
    windows: tuple[int, ...] = ()
    # The row of the position table that the first token uses.
    position_offset: int = 0
    rotary: Rotary | None = None
    # Pixels along an edge of image and patch, and colour channels; 0 without images.
    image: int = 0
    patch: int = 0
    channels: int = 0
