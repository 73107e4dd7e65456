"""Pre-trains a small GPT on a file of tokens, with DistributedDataParallel.

Run: sailorctl submit ddp_sailor.py -- --tokens DATA/tokens.npy
"""

import argparse
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import sailor


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(
            self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training
        )
        return x + F.dropout(
            self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout, self.training
        )


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout=0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tokens(Dataset):
    def __init__(self, path: str, context: int) -> None:
        self.tokens, self.context = np.load(path, mmap_mode="r"), context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self.context
        piece = torch.from_numpy(self.tokens[begin : begin + self.context + 1].astype(np.int64))
        return piece[:-1], piece[1:]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(vocabulary=256, context=args.context, layers=4, width=96, heads=4)
    dataset = Tokens(args.tokens, args.context)
    loader = DataLoader(dataset, args.batch_size, shuffle=True)
    steps = args.epochs * len(loader)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 5, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    )

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    options = {"loss": loss, "optimizer": optimizer, "scheduler": scheduler, "clip_norm": 1.0}
    sailor.Trainer(model, loader, epochs=args.epochs, **options).train()
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
