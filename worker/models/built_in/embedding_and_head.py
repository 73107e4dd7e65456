"""The first and the last layer of a language model: token ids to hidden states to logits."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from simulator.models.architecture import Architecture
from simulator.models.layers import Model
from simulator.spec.job import Job
from worker.layout.split_spec import SplitKind
from worker.models.built_in.aligned_linear import AlignedLinear
from worker.models.built_in.attention import norm, tensor_rows


class TokenEmbedding(nn.Module):
    """Embeds token ids; adds learned positions if the model has them."""

    splits: ClassVar[dict[str, SplitKind]] = {"token": "vocabulary", "own_rows": "tokens"}

    def __init__(self, job: Job, architecture: Architecture) -> None:
        super().__init__()
        model, width = job.model, architecture.embedding_width
        rows = tensor_rows(model, 0, "position.weight")
        self.position_offset = architecture.position_offset
        self.token = nn.Embedding(model.vocab, width)
        is_narrow = width != model.hidden
        self.projection = nn.Linear(width, model.hidden, bias=False) if is_narrow else None
        self.position = nn.Embedding(rows, model.hidden) if rows else None
        self.own_rows = nn.Identity()
        self.dropout = nn.Dropout(job.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.token(tokens)
        if self.projection is not None:
            x = self.projection(x)
        if self.position is not None:
            first = self.position_offset
            rows = torch.arange(first, first + tokens.shape[1], device=tokens.device)
            x = x + self.position(self.own_rows(rows))
        dropped: Tensor = self.dropout(x)
        return dropped


class LanguageHead(nn.Module):
    """The final norm and the projection to logits over the vocabulary."""

    splits: ClassVar[dict[str, SplitKind]] = {"entry": "entry", "projection": "vocabulary"}

    def __init__(self, model: Model, architecture: Architecture) -> None:
        super().__init__()
        width = architecture.embedding_width
        is_narrow = width != model.hidden
        self.norm = norm(model.hidden, architecture) if architecture.norm_first else None
        self.narrowing = nn.Linear(model.hidden, width, bias=False) if is_narrow else None
        self.entry = nn.Identity()
        self.projection = AlignedLinear(width, model.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)
        if self.narrowing is not None:
            x = self.narrowing(x)
        logits: Tensor = self.projection(self.entry(x))
        return logits
