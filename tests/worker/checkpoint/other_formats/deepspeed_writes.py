"""Let DeepSpeed train, store a checkpoint, and make a universal one by its own script.

It runs in a process of its own, with a stage of ZeRO, and writes what its engine had to
``FOLDER/expected.pt``: ``python -m tests.worker.checkpoint.other_formats.deepspeed_writes FOLDER
STAGE``.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from worker.engines.deepspeed import build_ops

STEPS = 2


def main(folder: Path, stage: int) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=61, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    settings: dict[str, Any] = {
        "train_batch_size": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    build_ops.use_extensions_folder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    for step in range(STEPS):
        tokens = torch.arange(32).view(4, 8).add(step).remainder(61)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(folder))
    expected = {
        name: [safe_get_full_fp32_param(parameter)]
        + [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
        for name, parameter in model.named_parameters()
    }
    torch.save(expected, folder / "expected.pt")
    stored = folder / f"global_step{STEPS}"
    ds_to_universal.main(
        Namespace(
            input_folder=str(stored),
            output_folder=f"{stored}_universal",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # What Megatron-DeepSpeed alone stores.
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
