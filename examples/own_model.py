"""A model, data and loss of one's own: a small GPT that learns to continue this file, by its bytes.

Alone: `python examples/own_model.py`. Under a plan on this machine:
`python -m worker run --job examples/own_model.py --plan PLAN`. On a cluster:
`sailorctl submit examples/own_model.py`.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import sailor

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
TOKENS, WIDTH = 64, 96


class Block(nn.Module):
    """Attention and a feed-forward network, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + functional.dropout(self.out(seen.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """Tokens to the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pieces:
    """Overlapping pieces of the text: inputs, and the tokens that follow them."""

    def __len__(self) -> int:
        return (len(TEXT) - TOKENS - 1) // 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = TEXT[16 * index : 16 * index + TOKENS + 1]
        return piece[:-1], piece[1:]


def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over all tokens, of which every sample has as many."""
    return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


torch.manual_seed(0)
model = Gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
trainer = sailor.Trainer(
    model,
    Pieces(),
    batch_size=16,
    steps=20,
    loss=loss,
    optimizer=optimizer,
    scheduler=scheduler,
    clip_norm=1.0,
    name="own-model",
)
trainer.train()
