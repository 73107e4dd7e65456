"""Let DeepSpeed's own engine load a universal checkpoint, and say whether it has every bit.

It runs in a process of its own, as
``python -m tests.worker.checkpoint.other_formats.deepspeed_reads FOLDER MANIFEST``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers

from tests.sailord.checkpoints.made import read_full
from worker.checkpoint.other_formats.convert import external_names
from worker.engines.deepspeed import build_ops


def main(folder: str, manifest: str) -> None:
    whole = read_full(manifest)
    expected = [external_names(whole.job, kind) for kind in whole.kinds]
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=61, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {
        "train_batch_size": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": True},
    }
    build_ops.use_extensions_folder()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    engine.load_checkpoint(folder)
    assert engine.global_steps == whole.progress.step
    compared = 0
    for name, parameter in model.named_parameters():
        for kind, key in enumerate((None, "exp_avg", "exp_avg_sq")):
            found = parameter.get_full_hp_param(*(() if key is None else (key,)))
            assert torch.equal(found.view(-1), expected[kind][name].view(-1)), (name, key)
            compared += 1
    assert compared == 3 * len(expected[0])
    print(f"{compared} tensors are equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
