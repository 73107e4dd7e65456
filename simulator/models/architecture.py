"""What must be known of a transformer to compute with it, beyond what its layers cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

# GELU by the error function, or by its approximation with tanh that GPT-2 was trained with.
Nonlinearity = Literal["gelu", "gelu_tanh", "relu", "swiglu"]
NONLINEARITIES: tuple[Nonlinearity, ...] = get_args(Nonlinearity)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Positions as angles: pair i of a head turns by position x base^(-2i / head width)."""

    base: float = 10_000.0
    # Longer contexts by slower turns: wavelengths beyond original_tokens / low_frequency are
    # stretched by the factor, those below original_tokens / high_frequency stay, the ones between
    # go from one to the other. Where both frequencies are 0, all are stretched.
    factor: float = 1.0
    low_frequency: float = 0.0
    high_frequency: float = 0.0
    original_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a transformer of a known family computes; sizes that ``Model`` has are not repeated."""

    head_dim: int
    nonlinearity: Nonlinearity
    embedding_width: int
    rms_norm: bool = False
    norm_first: bool = True
    norm_epsilon: float = 1e-5
    # Scores are divided by the root of the head width.
    scaled_scores: bool = True
    # How many tokens each block looks back, itself included, 0 for all; empty: all, everywhere.
    windows: tuple[int, ...] = ()
    # The row of the position table that the first token uses.
    position_offset: int = 0
    rotary: Rotary | None = None
    # Pixels along an edge, and colours; 0 where there are no images.
    image: int = 0
    patch: int = 0
    channels: int = 0
