"""A custom model as a user would write it, without parallelism except for ``splits``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, HEADS, KV_HEADS = 19, 16, 4, 2


class Words(nn.Module):
    splits: ClassVar[dict[str, str]] = {"table": "vocabulary"}

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) * self.scale


class Mixer(nn.Module):
    """Attention without an entry, so that each projection sums its own gradient."""

    splits: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("query", "key", "value", "up"), "columns"),
        **{"out": "rows", "down": "rows", "drop": "heads"},
    }
    pieces: ClassVar[dict[str, int]] = {
        **{"query": HEADS, "out": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    }

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, KV_HEADS * size)
        self.value = nn.Linear(WIDTH, KV_HEADS * size)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        mixed = self.drop((q @ k.transpose(-1, -2)).softmax(-1)) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Answer(nn.Module):
    splits: ClassVar[dict[str, str]] = {"project": "vocabulary"}
    tied: ClassVar[dict[str, str]] = {"project.weight": "table.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)


def layers() -> list[nn.Module]:
    """Return full layers."""
    return [Words(), Mixer(dropout=0.2), Mixer(dropout=0.2), Answer()]


def recipes() -> list[object]:
    """Return functions that make layers, so that a rank makes only its own."""
    return [Words, Mixer, lambda: Mixer(dropout=0.2), Answer]


def nothing() -> list[nn.Module]:
    return []


def numbers() -> list[object]:
    return [Words(), Mixer(), 3, lambda: "head"]


def broken() -> list[nn.Module]:
    raise ValueError("no such file")


def unchained() -> list[nn.Module]:
    return [Words(), Mixer(), nn.Linear(WIDTH + 1, WIDTH), Answer()]


def headless() -> list[nn.Module]:
    return [Words(), Mixer(), Mixer(), nn.Identity()]


class Odd(Mixer):
    splits: ClassVar[dict[str, str]] = {**Mixer.splits, "norm": "columns", "up": "shards"}


def odd() -> list[nn.Module]:
    return [Words(), Odd(), Mixer(), Answer()]


class Sharing(Answer):
    tied: ClassVar[dict[str, str]] = {}


def sharing() -> list[nn.Module]:
    first, last = Words(), Sharing()
    last.project.weight = first.table.weight
    return [first, Mixer(), Mixer(), last]


class Several(Mixer):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]  # a mistake
        return super().forward(x), 1


def several() -> list[nn.Module]:
    return [Words(), Several(), Mixer(), Answer()]
