"""Trains a LLaMA on a file of tokens in bf16, its blocks sharded by FSDP2.

Run: torchrun --nproc-per-node 2 fsdp2.py --model DATA/llama --tokens DATA/tokens.npy
"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup


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
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    mesh = dist.init_device_mesh(kind, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    dataset = Tokens(args.tokens, args.context)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, args.steps)

    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = {name: value.to(device) for name, value in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")
            step += 1
            if step == args.steps:
                break
        epoch += 1

    if args.save:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            model.save_pretrained(args.save, state_dict=weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
