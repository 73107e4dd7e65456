"""The first and the last layer of a language model: token ids to hidden states to logits."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from worker.layout.split_spec import SplitKind
from worker.models.attention import norm


class TokenEmbedding(nn.Module):
    """Embeds token ids; adds learned positions if the model has them."""

    splits: ClassVar[dict[str, SplitKind]] = {"token": "vocabulary"}

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        hidden: int,
        position_rows: int,
        position_offset: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.position_offset = position_offset
        self.token = nn.Embedding(vocabulary, width)
        self.projection = nn.Linear(width, hidden, bias=False) if width != hidden else None
        self.position = nn.Embedding(position_rows, hidden) if position_rows else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.token(tokens)
        if self.projection is not None:
            x = self.projection(x)
        if self.position is not None:
            first = self.position_offset
            rows = torch.arange(first, first + tokens.shape[1], device=tokens.device)
            x = x + self.position(rows)
        dropped: Tensor = self.dropout(x)
        return dropped


class LanguageHead(nn.Module):
    """The final norm and the projection to logits over the vocabulary."""

    splits: ClassVar[dict[str, SplitKind]] = {"entry": "entry", "projection": "vocabulary"}

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        hidden: int,
        normed: bool,
        rms_norm: bool,
        norm_epsilon: float,
    ) -> None:
        super().__init__()
        self.norm = norm(hidden, rms=rms_norm, epsilon=norm_epsilon) if normed else None
        self.narrowing = nn.Linear(hidden, width, bias=False) if width != hidden else None
        self.entry = nn.Identity()
        self.projection = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)
        if self.narrowing is not None:
            x = self.narrowing(x)
        logits: Tensor = self.projection(self.entry(x))
        return logits
