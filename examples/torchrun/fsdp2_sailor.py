"""Trains a LLaMA on a file of tokens in bf16, its blocks sharded by FSDP2.

Run: sailorctl submit fsdp2_sailor.py -- --model DATA/llama --tokens DATA/tokens.npy
"""

import argparse

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

import sailor


class Tokens(Dataset):
    def __init__(self, path: str, context: int) -> None:
        self.tokens, self.context = np.load(path, mmap_mode="r"), context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * self.context : (index + 1) * self.context]
        tokens = torch.from_numpy(piece.astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    dataset = Tokens(args.tokens, args.context)
    loader = DataLoader(dataset, args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, args.steps)

    options = {"optimizer": optimizer, "scheduler": scheduler, "clip_norm": 1.0}
    sailor.Trainer(model, loader, steps=args.steps, precision="bf16", **options).train()

    if args.save:
        model.save_pretrained(args.save)


if __name__ == "__main__":
    main()
