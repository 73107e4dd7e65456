"""The first and the last layer of a vision transformer: images to patches to classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from simulator.models.architecture import Architecture
from simulator.models.layers import Model
from simulator.spec.job import Job
from worker.models.built_in.attention import norm


class PatchEmbedding(nn.Module):
    """Turns images (batch, channels, height, width) into a class token and one token per patch."""

    def __init__(self, job: Job, architecture: Architecture) -> None:
        super().__init__()
        hidden, self.edge = job.model.hidden, architecture.patch
        self.patch = nn.Linear(architecture.channels * self.edge**2, hidden)
        self.class_token = nn.Parameter(torch.empty(hidden))
        self.position = nn.Embedding((architecture.image // self.edge) ** 2 + 1, hidden)
        self.dropout = nn.Dropout(job.dropout)

    def forward(self, images: Tensor) -> Tensor:
        # (batch, channels, rows, edge, columns, edge) -> (batch, rows x columns, one patch each)
        batch, channels, height, width = images.shape
        edge = self.edge
        cells = images.reshape(batch, channels, height // edge, edge, width // edge, edge)
        patches = cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        first = self.class_token.expand(len(images), 1, -1)
        x = torch.cat((first, self.patch(patches)), 1) + self.position.weight
        dropped: Tensor = self.dropout(x)
        return dropped


class ClassHead(nn.Module):
    """The final norm and the projection of the class token to logits over the classes."""

    def __init__(self, model: Model, architecture: Architecture) -> None:
        super().__init__()
        self.norm = norm(model.hidden, architecture)
        self.projection = nn.Linear(model.hidden, model.vocab)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(x)[:, 0])
        return logits
